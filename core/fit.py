"""The loop of training: the next batch, a step, and now and then a log row, an evaluation, a save.

Nothing waits for the device except where a value is shown: metrics of a logged step are read once
the next step is under way. A folder that holds checkpoints is gone on with: what comes is a
function of the seed, the epoch and the position in it, so the run ends as if it had never stopped.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from core import nonfinite
from core.checkpoint import Best, Checkpoints, SaveError, check_savable, like
from core.data import Batch, Examples, batches, order, some
from core.encoding import decoded, encoded
from core.errors import NotFinite, UserError, differences
from core.mesh import row_shards
from core.report import Report
from core.rules import explain
from core.signals import Stopped, StopSignals

if TYPE_CHECKING:
    from core.trainer import Trainer

Metrics = dict[str, float]
# (epoch, params) -> the examples of one pass.
Source = Callable[[int, Any], Examples]
# (outputs, examples) -> metrics of predictions.
Score = Callable[[list[Any], Examples], Metrics]

NEVER = -1  # no step


@dataclasses.dataclass
class Progress:
    """How far a run is, as a checkpoint keeps it."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Of the next step."""
    position: int = 0
    """Steps done in that epoch."""
    evaluated: int = 0
    """The step of the latest evaluation."""
    best_score: float = -math.inf
    seconds: float = 0.0
    result: dict[str, Metrics] = dataclasses.field(
        default_factory=lambda: {"train": {}, "valid": {}, "best": {}}
    )


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
        # A source is asked epoch by epoch, so its total is only known where steps are given.
        self.from_source, self.total = callable(train), self.options.steps
        self.settings = self._settings() | self.options.settings() | {"total steps": self.total}
        if trainer.folder:  # that all can be saved is better known at once
            check_savable(self._carried())
            self._source()
        self.at = Progress()
        self.waiting: tuple[int, dict[str, jax.Array]] | None = None
        self.score_now: float | None = None
        self.may_save = True  # and so may have the best score
        self.checkpoints = (
            Checkpoints(trainer.folder, self.options.keep) if trainer.folder else None
        )
        try:
            messages = self._restore(trainer.folder) if trainer.folder else []
        except BaseException:
            self._close_checkpoints()
            raise
        self.saved, self.began = self.at.step, time.monotonic() - self.at.seconds
        self.skipped = highest(trainer.state.skipped)
        # Steps that the trainer did before this run.
        self.before = highest(trainer.state.step) - self.at.step
        self.report = Report(
            trainer.folder,
            self.total or None,
            start=self.at.step,
            unit=trainer.unit,
            show=trainer.show,
            options=self.options.report,
        )
        for message in messages:
            self.report.message(message)

    def _settings(self) -> dict[str, Any]:
        """Looks at the training data; returns what else the numbers of the run depend on."""
        if not callable(self.train):
            self.examples = self.train
            number = some(self.train, "training data")
            self.total = self.options.total_steps(number)
            self.epoch_steps = math.ceil(number / self.options.batch_size)
            return {"training examples": number}
        if hasattr(self.train, "state") != hasattr(self.train, "restore"):
            raise UserError("A source has both `state()` and `restore(state)`, or neither.")
        return {}

    def run(self) -> dict[str, Any]:
        """See `Trainer.fit`."""
        self._keep_shardings()
        layout, mesh = self.trainer.layout, self.trainer.mesh
        if layout.width != layout.rows:
            self.report.message(
                f"A microbatch of {layout.rows} rows is padded to {layout.width}, which "
                f"{row_shards(mesh)} devices divide; the results are the same."
            )
        with contextlib.ExitStack() as stack:
            stack.push(self._close_report)
            stack.callback(self._close_checkpoints)
            stream = stack.enter_context(contextlib.closing(self._batches()))
            left = self.total - self.at.step if self.total else None
            stop = stack.enter_context(StopSignals("epoch" if self.from_source else "step"))
            for batch, rows, epoch_ends in itertools.islice(stream, left):
                last = self._step(batch, rows, epoch_ends)
                if stop.asked() and not last and self.may_save:
                    self._save()
                    self._settle()
                    raise Stopped(self.at.step, self.trainer.folder)
            self._log()
            self._evaluate()
            self._save()
            self._settle()
        seconds = time.monotonic() - self.began
        return {"steps": self.at.step, "seconds": seconds} | self.at.result

    def _keep_shardings(self) -> None:
        """Says what is not split over tensor and might be, and keeps how all is split."""
        trainer = self.trainer
        for problem in trainer.inferred.problems:
            self.report.message(problem)
        if trainer.folder is None or jax.process_index():
            return
        try:
            explain.save(trainer.folder, trainer.inferred, trainer.state.params, trainer.mesh)
        except OSError as error:
            self.report.message(f"{trainer.folder / explain.FILE} cannot be written ({error}).")

    def _step(self, batch: Batch, rows: int, epoch_ends: bool) -> bool:
        """One step and what is due after it; returns whether it was the last."""
        at, options, before = self.at, self.options, self.at.step
        metrics = self._advance(batch)
        at.epoch, at.position = (at.epoch + 1, 0) if epoch_ends else (at.epoch, at.position + 1)
        last = 0 < self.total <= at.step or (not options.steps and at.epoch == options.epochs)
        self.may_save = last or epoch_ends or not self.from_source
        self.report.advance(at.step, rows)
        self._log()
        if last or _due(before, at.step, options.report.log_every):
            self.waiting = (at.step, metrics)
        if _due(before, at.step, options.eval_every, epoch_ends):
            self._evaluate()
        evaluated = epoch_ends if self.valid is None else at.evaluated == at.step
        improved = at.result["best"].get("step") == at.step
        due = _due(before, at.step, options.save_every, evaluated) or improved
        if self.from_source:  # its state, or what it makes of the parameters, is known there alone
            due = epoch_ends and (improved or _due(self.saved, at.step, options.save_every or 1))
        if due and not last:
            self._save()
        return last

    def _advance(self, batch: Batch) -> dict[str, jax.Array]:
        """Does a step, or begins to; returns its metrics."""
        metrics: dict[str, jax.Array]
        self.trainer.state, metrics = self.trainer.step_jit(self.trainer.state, batch)
        self.at.step += 1
        return metrics

    def _batches(self) -> Generator[tuple[Batch, int, bool]]:
        """The batches that are left, each with its number of rows and whether it ends its epoch."""
        epochs = itertools.count() if self.options.steps else range(self.options.epochs)
        for epoch in itertools.islice(epochs, self.at.epoch, None):
            if callable(self.train):
                self._check()
                self.epoch, self.epoch_began = epoch, self.at.step
                self.examples = self.train(epoch, self.trainer.state.params)
            rows = order(self.options.seed, epoch, some(self.examples, "training data"))
            layout, collate = self.trainer.layout, self.trainer.collate
            done, size = self.at.position, layout.batch_size
            ahead = batches(self.examples, rows[done * size :], layout, collate, "training data")
            steps = math.ceil(len(rows) / size)
            for number, batch in enumerate(ahead, done + 1):
                yield batch, min(size, len(rows) - (number - 1) * size), number == steps

    def _log(self) -> None:
        """Writes the metrics that wait to be read, if any."""
        if self.waiting is None:
            return
        (step, on_device), self.waiting = self.waiting, None
        metrics = {name: float(value) for name, value in jax.device_get(on_device).items()}
        first_bad, skipped = (int(metrics.pop(name)) for name in ("first_bad", "skipped"))
        if self.options.on_nonfinite == "skip":
            metrics["skipped"] = skipped
        self.at.result["train"] = self.trainer.figures(metrics)
        self.report.log(step, self.at.result["train"])
        self._stop_if_bad(first_bad)
        if skipped > self.skipped:
            self.report.message(f"{skipped} steps so far were not finite, and were skipped.")
        self.skipped = skipped

    def _evaluate(self) -> None:
        if self.valid is None or self.at.evaluated == self.at.step:
            return
        self._check()
        metrics = self.trainer.evaluate(self.valid)
        if self.score is not None:
            scores = self.score(self.trainer.predict(self.valid), self.valid)
            try:
                metrics |= {name: float(value) for name, value in scores.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise UserError(
                    f"score returned {scores!r}; it must be a dict of numbers."
                ) from error
        self.report.log(self.at.step, metrics, "valid")
        self.at.evaluated, self.at.result["valid"] = self.at.step, metrics
        self.score_now = self.best.score(metrics) if self.best and self.may_save else None
        if self.score_now is not None and self.score_now > self.at.best_score:
            self.at.best_score = self.score_now
            self.at.result["best"] = metrics | {"step": self.at.step}

    def _save(self) -> None:
        if self.checkpoints is None or self.saved == self.at.step:
            return
        self._check()  # a run that goes on from here does not log this step again
        self._try_checkpoint(self.at)

    def _try_checkpoint(self, at: Progress) -> None:
        try:
            self._checkpoint(at)
        except SaveError as error:
            self.saved = NEVER
            self.report.message(f"{error}; the next one is tried all the same.")

    def _checkpoint(self, at: Progress) -> None:
        """Begins to save the state as that of a point of the run.

        Raises:
          SaveError: it could not be begun. (That the one before failed is said.)
        """
        assert self.checkpoints is not None, "where there is a folder"
        try:
            self.checkpoints.wait()
        except SaveError as error:
            self.report.message(f"{error}; now that of step {at.step} is tried.")
        at.seconds = time.monotonic() - self.began
        run = {"at": dataclasses.asdict(at), "settings": self.settings, "source": self._source()}
        score = self.score_now if at.evaluated == at.step else None
        params, rest = self._carried()
        self.checkpoints.save(at.step, params, rest, run, score)
        self.saved = at.step

    def _settle(self) -> None:
        """Waits for the checkpoint of this step, and tries once more where it failed.

        Raises:
          UserError: it failed again.
        """
        if self.checkpoints is None:
            return
        for more in (True, False):
            try:
                if self.saved != self.at.step:
                    self._checkpoint(self.at)
                self.checkpoints.wait()
                return
            except SaveError as error:
                self.saved = NEVER
                if not more:
                    raise UserError(
                        f"The run is at step {self.at.step}, but {error}. Make room, or let the "
                        "folder be written: the run goes on from the checkpoint before it."
                    ) from error
                self.report.message(f"{error}; it is tried once more.")

    def _close_report(self, kind: Any, at_hand: BaseException | None, trace: Any) -> None:
        try:
            self.report.close()
        except OSError as error:
            text = f"The report of the run could not be finished ({error}); its weights are saved."
            if at_hand is None:
                raise UserError(text) from error
            self.report.message(text.replace("; its weights are saved", ""))

    def _close_checkpoints(self) -> None:
        """Ends the saving; where it fails, the error at hand is the one to show."""
        try:
            if self.checkpoints:
                self.checkpoints.close()
        except SaveError as error:
            self.report.message(f"{error}.")

    def _source(self) -> Any:
        return encoded(self.train.state(), "state()") if hasattr(self.train, "state") else None

    def _restore(self, folder: Path) -> list[str]:
        """Goes on from the latest good checkpoint, if there is one; returns what to say of it."""
        assert self.checkpoints is not None, "where there is a folder"
        if not self.checkpoints.steps():
            return []
        run = self.checkpoints.run()
        if run and (table := differences(run["settings"], self.settings)):
            raise UserError(
                f"The run in {folder} cannot go on with other settings, which would change its "
                f"numbers:\n{table}\nGive those that it has, or another folder."
            )
        messages: list[str] = []
        wanted, others = like(self._carried())
        jax.tree.map(lambda x: x.delete(), self._carried())  # not both fit into memory
        params, rest, run = self.checkpoints.restore(wanted, others, messages.append)
        self._carry(params, rest)
        self.at = Progress(**run["at"])
        if hasattr(self.train, "restore"):
            self.train.restore(decoded(run["source"]))
        says = "is finished already" if self.at.step == self.total else "goes on after"
        return [*messages, f"The run in {folder} {says}: step {self.at.step}."]

    def _carried(self) -> tuple[Any, dict[str, Any]]:
        """What steps change, to be saved: the parameters, and the rest."""
        state = self.trainer.state
        rest = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return rest.pop("params"), rest

    def _carry(self, params: Any, rest: dict[str, Any]) -> None:
        """Takes up what was saved."""
        self.trainer.state = dataclasses.replace(self.trainer.state, params=params, **rest)

    def _check(self) -> None:
        """Writes what waits to be logged, and stops at a state that is not to be built on."""
        self._log()
        self._stop_if_bad(highest(self.trainer.state.first_bad))

    def _stop_if_bad(self, first_bad: int) -> None:
        if first_bad:
            self._stop_at(first_bad - self.before)

    def _stop_at(self, bad: int) -> NoReturn:
        """Says what is wrong with a step, and saves what was before it."""
        trainer, options = self.trainer, self.options
        zero = jax.device_put(np.int32(0), trainer.state.step.sharding)
        # No update was applied since, so the parameters are those before the step.
        trainer.state = dataclasses.replace(
            trainer.state,
            step=zero + (self.before + bad - 1),
            first_bad=zero,
            in_a_row=zero,
            skipped=trainer.state.skipped - trainer.state.in_a_row,
        )
        again = bad  # the step to do once more
        if self.from_source:
            # Of a row that began in an earlier epoch, the first step whose examples are at hand.
            again = max(bad, self.epoch_began + 1)
            epoch, position = self.epoch, again - 1 - self.epoch_began
        else:
            epoch, position = divmod(bad - 1, self.epoch_steps)
        everything = order(options.seed, epoch, some(self.examples, "training data"))
        rows = everything[position * options.batch_size :][: options.batch_size]
        said = nonfinite.explain(trainer, self.examples, rows, self.before + again - 1)
        # (An evaluation since then belongs to what comes after.)
        known = not self.from_source and self.at.evaluated < bad
        if trainer.folder and known and self.saved < bad - 1:
            before = dataclasses.replace(self.at, step=bad - 1, epoch=epoch, position=position)
            self._try_checkpoint(before)
        also = f", nor the {options.too_many - 1} after it" if options.too_many > 1 else ""
        where = f"Step {bad}" if again > bad else f"Step {bad} (epoch {epoch})"
        it = f"step {again} (epoch {epoch})" if again > bad else "it"
        raise NotFinite(
            f"{where} was not finite{also}. Done once more, {it} has {said} No "
            "update was applied from there on. Try a lower learning rate, a lower clip norm, the "
            "compute dtype float32, or on_nonfinite skip."
        )


def highest(steps: jax.Array) -> int:
    """A number of steps, the largest where several states are stacked."""
    return int(np.max(steps))


def _due(before: int, now: int, every: int, otherwise: bool = False) -> bool:
    """Whether something that happens every so many steps, or else on occasion, happens now."""
    return now // every > before // every if every else otherwise
