"""The loop of training: the next batch, a step, and now and then a log row, an evaluation, a save.

Nothing waits for the device except where a value is shown: metrics of a logged step are read once
the next step is under way.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import jax

from core.checkpoint import FOLDER, Best, Checkpoints
from core.data import Batch, Examples, batches, order, some
from core.errors import UserError
from core.mesh import row_shards
from core.report import Report
from core.signals import Stopped, StopSignals

if TYPE_CHECKING:
    from core.trainer import Trainer

Metrics = dict[str, float]
# (epoch, params) -> the examples of one pass.
Source = Callable[[int, Any], Examples]
# (outputs, examples) -> metrics of predictions.
Score = Callable[[list[Any], Examples], Metrics]


class Loop:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        trainer: "Trainer",
        train: Examples | Source,
        valid: Examples | None,
        score: Score | None,
        best: Best | None,
    ):
        self.trainer, self.train, self.valid, self.score = trainer, train, valid, score
        self.options, self.best = trainer.options, best
        if best is not None and valid is None:
            raise UserError(f"best={best} needs evaluations: give `valid` too.")
        # (Of several processes, one may be about to write there: `Run` has asked the first.)
        alone, files = jax.process_count() == 1, ("metrics.jsonl", FOLDER)
        if alone and trainer.folder and any((trainer.folder / name).exists() for name in files):
            raise UserError(f"{trainer.folder} holds a run already: give another folder.")
        # A source is asked epoch by epoch, so its total is only known where steps are given.
        self.total = (
            self.options.steps
            if callable(train)
            else self.options.total_steps(some(train, "training data"))
        )
        self.step = self.logged = self.evaluated = self.saved = 0
        self.waiting: tuple[int, dict[str, jax.Array]] | None = None
        self.score_now: float | None = None
        self.best_score = -math.inf
        self.result: dict[str, Any] = {"train": {}, "valid": {}, "best": {}}
        self.report = Report(
            trainer.folder,
            self.total or None,
            unit=trainer.unit,
            show=trainer.show,
            options=self.options.report,
        )
        self.checkpoints = (
            Checkpoints(trainer.folder, self.options.keep) if trainer.folder else None
        )

    def run(self) -> dict[str, Any]:
        """See `Trainer.fit`."""
        began, trainer, every = time.monotonic(), self.trainer, self.options.report.log_every
        layout = trainer.layout
        if layout.width != layout.rows:
            self.report.message(
                f"A microbatch of {layout.rows} rows is padded to {layout.width}, which "
                f"{row_shards(trainer.mesh)} devices divide; the results are the same."
            )
        with contextlib.ExitStack() as stack:
            stack.callback(self.report.close)
            if self.checkpoints:
                stack.callback(self.checkpoints.close)
            stream = stack.enter_context(contextlib.closing(self._batches()))
            # Several processes must stop at the same step, which no signal can promise them.
            alone = jax.process_count() == 1
            stop = stack.enter_context(StopSignals()) if alone else StopSignals()
            for batch, epoch_ends in itertools.islice(stream, self.total or None):
                trainer.state, metrics = trainer.step_jit(trainer.state, batch)
                self.step += 1
                self.report.advance(self.step)
                self._log()
                if self.step % every == 0 or self.step == self.total:
                    self.waiting = (self.step, metrics)
                if _due(self.step, self.options.eval_every, epoch_ends):
                    self._evaluate()
                evaluated = epoch_ends if self.valid is None else self.evaluated == self.step
                if _due(self.step, self.options.save_every, evaluated):
                    self._save()
                if stop.received and self.step != self.total:
                    self._log()
                    self._save()
                    raise Stopped(f"stopped at step {self.step} by {stop.received.name}")
            if self.logged != self.step:
                self.waiting = (self.step, metrics)
            self._log()
            self._evaluate()
            self._save()
        return {"steps": self.step, "seconds": time.monotonic() - began} | self.result

    def _batches(self) -> Generator[tuple[Batch, bool]]:
        """The batches of all epochs, each with whether it ends its epoch."""
        for epoch in itertools.count() if self.options.steps else range(self.options.epochs):
            train = self.train
            examples = train(epoch, self.trainer.state.params) if callable(train) else train
            rows = order(self.options.seed, epoch, some(examples, "training data"))
            layout, collate = self.trainer.layout, self.trainer.collate
            ahead = batches(examples, rows, layout, collate, "training data")
            steps = math.ceil(len(rows) / layout.batch_size)
            for number, batch in enumerate(ahead, 1):
                yield batch, number == steps

    def _log(self) -> None:
        """Writes the metrics that wait to be read, if any."""
        if self.waiting is None:
            return
        (self.logged, on_device), self.waiting = self.waiting, None
        metrics = {name: float(value) for name, value in jax.device_get(on_device).items()}
        first_bad = int(metrics.pop("first_bad"))
        self.result["train"] = self.trainer.figures(metrics)
        self.report.log(self.logged, self.result["train"])
        if first_bad:
            raise UserError(
                f"The loss or its gradient was not finite at step {first_bad}, and no update was "
                "applied from there on. Try a lower learning rate, a lower clip norm, or the "
                "compute dtype float32."
            )

    def _evaluate(self) -> None:
        if self.valid is None or self.evaluated == self.step:
            return
        self._log()
        metrics = self.trainer.evaluate(self.valid)
        if self.score is not None:
            scores = self.score(self.trainer.predict(self.valid), self.valid)
            try:
                metrics |= {name: float(value) for name, value in scores.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError(
                    f"score returned {scores!r}; it must be a dict of numbers."
                ) from error
        self.report.log(self.step, metrics, "valid")
        self.evaluated, self.result["valid"] = self.step, metrics
        self.score_now = self.best.score(metrics) if self.best else None
        if self.score_now is not None and self.score_now > self.best_score:
            self.best_score = self.score_now
            self.result["best"] = metrics | {"step": self.step}

    def _save(self) -> None:
        if self.checkpoints is None or self.saved == self.step:
            return
        score = self.score_now if self.evaluated == self.step else None
        state = self.trainer.state
        rest = {"step": state.step, "opt_state": state.opt_state, "first_bad": state.first_bad}
        self.checkpoints.save(self.step, state.params, rest, score)
        self.saved = self.step


def _due(step: int, every: int, otherwise: bool) -> bool:
    """Whether something that happens every so many steps, or else on occasion, happens now."""
    return step % every == 0 if every else otherwise
