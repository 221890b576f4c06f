"""after:EARLIER+TASK, such as after:lookup+arithmetic: only the last question says what to do."""
from nanochat.data.conversation import Conversation
from nanochat.data.task import Slice
from nanochat.runtime.errors import UserError
from nanochat.tasks import make_task


class After(Slice):
    """The conversations of TASK, each after one turn of EARLIER. argument: "EARLIER+TASK"."""

    def __init__(self, argument: str, split: str) -> None:
        earlier, plus, task = argument.partition("+")
        if not plus:
            raise UserError(f"task 'after:{argument}': expected after:EARLIER+TASK, such as after:lookup+arithmetic")
        self.earlier = make_task(earlier, split)
        last = make_task(task, split)
        super().__init__(last, range(len(last)))
        self.name = f"{last.name} after {self.earlier.name}"

    def conversation(self, index: int) -> Conversation:
        before = self.earlier[index % len(self.earlier)]["messages"][-2:]
        last = super().conversation(index)
        return last | {"messages": before + [message for message in last["messages"] if message["role"] != "system"]}
