"""The tools with a library of one's own files, which is made again when they have changed."""
import sys
import threading

from nanochat.inference.tools import Tools, found_by, open_tools
from nanochat.library.make_library import make_library
from nanochat.library.own_files import fingerprint
from nanochat.library.retrieval import Library
from nanochat.runtime.errors import first_line


class FreshTools(Tools):
    """Tools whose library is made again when the user's files that it was made from have changed."""
    files = ""                  # fingerprint of the last ones that were, or could not be, made into a library
    lock = threading.Lock()     # one for all: they may share a library

    def refresh(self) -> None:
        """Other questions wait meanwhile. After an error, one line for each state of the files, the library stays."""
        # Python's documentation has no fingerprint.
        if not self.library or not self.library.manifest["files"]:
            return
        with self.lock:
            made = self.library.manifest
            try:
                files = fingerprint(made["source"])
                if files in (self.files, made["files"]):
                    return
                self.files = files
                # An absolute name is a path: the file that is open is replaced.
                name = str(self.library.path.absolute().with_suffix(""))
                self.library = Library(make_library(made["source"], name, made["field"], made["encoding"], quiet=True))
                found_by.cache_clear()  # it would keep the old library's file open
            # Whatever is wrong with the files: an answer from the library as it was is better than none.
            except Exception as error:
                print(f"{made['source']} has changed, but cannot be read again: {first_line(error)}", file=sys.stderr)


def open_library(name: str | None, copying: bool = True) -> Tools:
    """The tools with a library, see `open_tools`, which is made again if its files have changed."""
    tools = FreshTools(open_tools(name, copying).library, copying)
    tools.refresh()
    return tools
