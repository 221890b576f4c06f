"""Questions that the page suggests: titles of a user's own notes, and held-out questions of a model's tasks."""
from itertools import chain

from nanochat.data.task import LOOKING_UP, task_names
from nanochat.library.retrieval import Library
from nanochat.tasks import without_parts
from nanochat.tasks.common import read_texts

OF_PYTHON = {"lookup", "search", "pydoc"}  # ask about Python's library


def example_questions(specs: str, library: Library | None = None) -> list[str]:
    """
    Four questions that a model trained on these tasks should answer: two about titles of a library made from a user's
    own files, if there is one; then examples.toml's, about Python's library only if it is there.
    """
    questions = []
    of_python = library is not None and library.manifest["source"] == "python"
    if library and not of_python and task_names(specs) & LOOKING_UP:
        questions = [f"What does it say about {title}?" for title, in library.query(
            "SELECT title FROM passages WHERE length(title) < 40 GROUP BY title ORDER BY min(id) LIMIT 2")]
    trained = without_parts(specs).split(",")
    examples = [examples for task, examples in read_texts("examples").items()
                if task in trained and (of_python or task not in OF_PYTHON)]
    questions += chain.from_iterable(zip(*examples))
    return questions[:4]
