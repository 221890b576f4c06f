"""Data sets of the Hugging Face hub, or of local folders with the same layout; SmolTalk, the plainest of them."""
from nanochat.data.conversation import Conversation
from nanochat.data.task import Task
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import base_dir
from nanochat.tasks.common import shuffled


class HubTask(Task):
    """
    A data set of the Hugging Face hub. Its rows come in a shuffled order that is always the same, because many data
    sets are sorted, and the first hundred of them would all be about one subject.
    """
    hub = ""        # its name there
    folder = ""     # its name below $NANOCHAT_BASE_DIR/tasks/

    def __init__(self, config: str, split: str) -> None:
        self.rows = load_rows(self.hub, self.folder, config, split)
        self.order = shuffled(len(self.rows), self.hub)

    def __len__(self) -> int:
        return len(self.rows)

    def conversation(self, index: int) -> Conversation:
        number = int(self.order[index])
        try:
            return self.convert(self.rows[number])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{self.hub}: row {number} is not as expected: {reason}") from error

    def convert(self, row: dict) -> Conversation:
        """The conversation of a row."""
        raise NotImplementedError


class SmolTalk(HubTask):
    """Conversations about everything, to train on."""
    name, hub, folder = "SmolTalk", "HuggingFaceTB/smol-smoltalk", "smoltalk"

    def __init__(self, argument: str, split: str) -> None:
        super().__init__("data", split)

    def convert(self, row: dict) -> Conversation:
        """messages: [{role, content}], maybe a system message first."""
        return {"messages": [{"role": message["role"], "content": message["content"]} for message in row["messages"]]}


def load_rows(hub: str, folder: str, config: str, split: str):
    """
    The rows of a data set: from the folder $NANOCHAT_BASE_DIR/tasks/<folder> if it is there, else from the hub.

    The folder has the layout of the hub's repository, one folder for each configuration:

        tasks/smoltalk/data/train-00000-of-00004.parquet …           HuggingFaceTB/smol-smoltalk (train, test)
        tasks/mmlu/auxiliary_train/train-00000-of-00001.parquet      cais/mmlu (to train on)
        tasks/mmlu/all/test-00000-of-00001.parquet                   cais/mmlu (to be measured by)
        tasks/arc/ARC-Easy/train-00000-of-00001.parquet              allenai/ai2_arc (and ARC-Challenge; train, test)
        tasks/gsm8k/main/train-00000-of-00001.parquet                openai/gsm8k (train, test)
        tasks/humaneval/openai_humaneval/test-00000-of-00001.parquet openai/openai_humaneval (test)

    so `hf download --repo-type dataset openai/gsm8k --local-dir tasks/gsm8k` makes it; files of .jsonl do as well.
    UserError when the package or the data is missing.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"the data set {hub} needs the `datasets` package: pip install datasets") from None
    tasks = base_dir() / "tasks"
    local = tasks / folder
    source = local / config
    try:
        if local.is_dir():
            rows = datasets.load_dataset(str(source), split=split, cache_dir=str(tasks / "cache"))
        else:
            source = f"{hub} from the hub, and there is no {local}"
            rows = datasets.load_dataset(hub, None if config == "data" else config, split=split)
    except Exception as error:  # the package raises all kinds: no network, no such set, a damaged file
        raise UserError(f"cannot load the {split} split of {source}: {first_line(error)}") from error
    if not len(rows):
        raise UserError(f"the {split} split of {source} has no rows")
    return rows
