"""What a training script does besides training, from its first step to its end: saving, logging, obeying signals."""
import contextlib
from collections.abc import Iterator

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.compile import compile_model
from nanochat.model.gpt import model_without_memory
from nanochat.optim.schedule import is_due
from nanochat.optim.sharding import Sharding, StepStats
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import after_first_step, compute_cleanup, mark_begun
from nanochat.runtime.flops import peak_flops
from nanochat.runtime.stopping import StopRequest
from nanochat.training.metrics import Metrics
from nanochat.training.records import SCRIPTS
from nanochat.training.run_report import remove_sections, settings_table, write_section
from nanochat.training.saving import CheckpointWriter
from nanochat.training.starting import Start


class Session:
    """
    The life of a run in this process. Made last, after all settings are checked: it compiles, claims the folder of the
    checkpoints and catches signals. What an earlier run left there stays until the first step is done (`begin_run`).
    COLLECTIVE, as are its methods.

    settings: of the script.
    tokens_per_step: over all ranks; 0 if steps differ. meta: further JSON values for its checkpoints, such as `data`,
    the data set that the base model was trained on. step: the number of the next optimizer step.
    """

    def __init__(self, start: Start, settings: dict, sharding: Sharding, optimizers: tuple, tokenizer: Tokenizer,
                 num_iterations: int, tokens_per_step: int = 0, **meta):
        self.settings, self.sharding, self.num_iterations = settings, sharding, num_iterations
        self.meta = dict(meta, config=settings, num_iterations=num_iterations, total_batch_size=tokens_per_step)
        self.stage = start.checkpoints.parent.name.removesuffix("_checkpoints")
        self.section = SCRIPTS[self.stage]  # of the report
        before = start.resumed or {}
        self.step = self.first_step = before.get("step", 0)
        if self.step < num_iterations != before.get("num_iterations", num_iterations):
            print0(f"the run has {num_iterations} steps now, it had {before['num_iterations']}: learning rates, "
                   f"momentum and weight decay follow from that number, and may jump at step {self.step}")
            if settings.get("ema_nesterov") and self.step == before["num_iterations"]:
                print0(f"its weights at step {self.step} are blended with the mean of its late steps, as at a run's "
                       "end; they will be again at the new end")
        model = sharding.model
        if set_compile(settings["compile"], sharding.device.type):
            compile_model(model)
        whole = model_without_memory(model.config)  # a pipeline's stage is a part of it
        self.saver = CheckpointWriter(start.checkpoints, sharding, optimizers, tokenizer, self.step,
                                      before.get("by_time"), settings["keep_last"], settings["overwrite"])
        self.metrics = Metrics(start.checkpoints, settings, self.step, num_iterations, tokens_per_step,
                               whole.estimate_flops(), peak_flops(sharding.device, sharding.dtype),
                               before.get("metrics_state"))
        self.stop = StopRequest()

    def begin_run(self) -> None:
        """Rank 0, after the first step, or if none is left to train: what is left of an earlier run makes way."""
        self.metrics.begin_file()
        self.saver.mark_replaced()
        mark_begun()
        # The report's sections about the model that this run replaces.
        if self.first_step == 0:
            remove_sections(self.section, self.meta["data"], self.saver.folder.name)

    def save_if_due(self, **meta) -> None:
        """
        Between two steps: save a checkpoint if one is due, if the run ends or stops here, or if rank 0 says that
        the last one is half an hour old. meta: values that change with the step. UserError if the run has diverged.
        """
        metrics = self.metrics
        metrics.raise_if_diverged(self.step)
        due = is_due(self.step, self.num_iterations, self.settings["save_every"])
        asked_for = due or metrics.stop_requested or self.step >= self.num_iterations
        if asked_for or metrics.save_requested:
            with metrics.paused():
                metrics.save_requested = False
                everything = self.meta | meta | {"metrics_state": metrics.state}
                self.saver.save(self.step, everything, by_time=not asked_for)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around code that changes no parameters: it counts for no step, and all ranks leave it if one must stop."""
        with self.metrics.paused(), self.metrics.stoppable():
            yield

    def requests(self) -> tuple[bool, bool]:
        """Whether this rank asks all ranks to stop, and to save a checkpoint; `reduce_and_clip` tells them."""
        return self.stop.asked, self.saver.time_is_up()

    def end_step(self, stats: StepStats, lrm: float, tokens: int | None = None) -> None:
        """
        After an update: log the step and increment `step`. lrm and tokens: see `Metrics.log_step`. Reads the previous
        step's numbers: the one place where the host waits for a GPU.
        """
        self.metrics.log_step(self.step, stats.values, lrm, tokens)
        # All ranks have compiled: shorter timeouts from here.
        if self.step == self.first_step:
            after_first_step(*self.sharding.groups.values())
            from_rank0(self.begin_run)
        self.step += 1

    def end(self) -> None:
        """Wait for the last save and close the log. A run that a signal has stopped ends here: SystemExit."""
        if self.first_step == self.num_iterations:
            from_rank0(self.begin_run)
            from_rank0(self.saver.remove_old)
        self.saver.wait()
        self.metrics.close()
        if self.metrics.stop_requested:
            self.stop.end(self.step, self.settings["resume"])

    def report(self, title: str, results: dict) -> None:
        """
        After the end: write the stage's section of the report, print how to try its model, and leave the other ranks.
        """
        model_tag = self.saver.folder.name
        write_section(self.section, title, settings_table(self.settings), self.stage, results,
                      data=self.meta["data"], model_tag=model_tag)
        print0(f"talk to it: python -m scripts.chat_cli --source={self.stage} --model_tag={model_tag}")
        compute_cleanup(self.stop.asked)
