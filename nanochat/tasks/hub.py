"""Data sets from the Hugging Face hub, or from local folders with the same layout; SmolTalk, the simplest one."""
from nanochat.data.conversation import Conversation
from nanochat.data.task import Task
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import base_dir
from nanochat.tasks.common import shuffled


class HubTask(Task):
    """
    A data set of the Hugging Face hub: from the folder $NANOCHAT_BASE_DIR/tasks/<folder> if it is there, else from the
    hub. Its rows come in a shuffled order that is always the same, because many data sets are sorted: their first
    hundred rows would all be about one subject. Each data set has a method `convert`: row -> conversation.

    The folder has the layout of the hub's repository, one folder for each configuration:

        tasks/smoltalk/data/train-00000-of-00004.parquet …           HuggingFaceTB/smol-smoltalk (train, test)
        tasks/mmlu/auxiliary_train/train-00000-of-00001.parquet      cais/mmlu (for training)
        tasks/mmlu/all/test-00000-of-00001.parquet                   cais/mmlu (for evaluation)
        tasks/arc/ARC-Easy/train-00000-of-00001.parquet              allenai/ai2_arc (and ARC-Challenge; train, test)
        tasks/gsm8k/main/train-00000-of-00001.parquet                openai/gsm8k (train, test)
        tasks/humaneval/openai_humaneval/test-00000-of-00001.parquet openai/openai_humaneval (test)

    so `hf download --repo-type dataset openai/gsm8k --local-dir tasks/gsm8k` makes it; .jsonl files work as well.
    """
    hub = ""        # name on the hub
    folder = ""     # folder below $NANOCHAT_BASE_DIR/tasks/
    config = ""     # configuration

    def __init__(self, argument: str, split: str) -> None:
        """UserError if the package or the data is missing."""
        try:
            import datasets
        except ImportError:
            raise UserError(f"the data set {self.hub} needs the datasets package: . ./setup.sh hub") from None
        tasks = base_dir() / "tasks"
        local = tasks / self.folder
        source = local / self.config
        try:
            if local.is_dir():
                self.rows = datasets.load_dataset(str(source), split=split, cache_dir=str(tasks / "cache"))
            else:
                source = f"{self.hub} from the hub, and there is no {local}"
                self.rows = datasets.load_dataset(self.hub, None if self.config == "data" else self.config, split=split)
        except Exception as error:
            # The package raises many exceptions: no network, no such data set, a damaged file.
            raise UserError(f"cannot load the {split} split of {source}: {first_line(error)}") from error
        self.order = shuffled(len(self.rows), self.hub)

    def __len__(self) -> int:
        return len(self.rows)

    def conversation(self, index: int) -> Conversation:
        return self.convert(self.rows[int(self.order[index])])

    def convert(self, row: dict) -> Conversation:
        raise NotImplementedError


class SmolTalk(HubTask):
    """Conversations about everything, for training."""
    name, hub, folder, config = "SmolTalk", "HuggingFaceTB/smol-smoltalk", "smoltalk", "data"

    def convert(self, row: dict) -> Conversation:
        """messages: [{role, content}], maybe a system message first."""
        return {"messages": row["messages"]}
