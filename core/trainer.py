"""Construction, fit, evaluate, predict: all that an algorithm's three functions leave to be done.

The order of construction: check the three signatures, collate an example, trace, infer a sharding
for each parameter, and only then make the weights, right where they belong. `step.py` holds the
step, `data.py` what comes before it, `report.py` and `checkpoint.py` what comes after.
"""

import dataclasses
import functools
import json
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.checkpoint import Best, Saved
from core.compiled import CompiledLoop, Iteration
from core.contract import (
    CollateFn,
    LossFn,
    PredictFn,
    at_least_float32,
    check_loss,
    check_outputs,
    check_signatures,
    weighted_sums,
)
from core.data import AHEAD, Batch, Examples, Layout, batches, check_batch, collated, count, some
from core.errors import UserError, at_least
from core.fit import Loop, Metrics, Score, Source
from core.mesh import is_cpu, row_shards
from core.nonfinite import replay
from core.report import ReportOptions
from core.rules import Overrides, explain, infer
from core.signals import Ended
from core.step import (
    INIT,
    Arrays,
    cast,
    floating,
    initial_state,
    is_floating,
    make_step,
    row_keys,
    scan_sum,
    stream,
    summed_gradients,
)

# Options that may change while a run goes on: its numbers are the same.
FREE = {"save_every", "keep", "on_nonfinite", "max_skipped", "replay", "report"}
FREE |= {"explain", "explain_json"}


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    steps: int = 0
    """Optimizer steps to train for; 0 lets the epochs decide."""
    epochs: int = 1
    """Passes over the training data, where steps is 0."""
    batch_size: int = 16
    """Examples per optimizer step, over all devices, hosts and microbatches."""
    microbatches: int | Literal["auto"] = 1
    """Parts that a batch is computed in, one after the other, to save memory. "auto" is one part on
    accelerators and one row per device on CPU; it leaves the mesh free to change when a run goes
    on, and is meant for a loss that draws nothing, since each part has its own key."""
    clip_norm: float = 0.0
    """Largest global norm of the gradient, a larger gradient is scaled down to it; 0 is off."""
    compute_dtype: str = "auto"
    """Floating-point type of the computation (weights stay float32); "auto" is bfloat16 on
    accelerators and the type of the weights on CPU."""
    eval_every: int = 0
    """Optimizer steps between two evaluations; 0 evaluates after each epoch."""
    save_every: int = 0
    """Optimizer steps between two checkpoints; 0 saves with each evaluation."""
    keep: int = 1
    """Latest checkpoints that are kept, the best one apart."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Where a loss or gradient is not finite: stop the run, or skip the update and go on."""
    max_skipped: int = 10
    """Skipped steps in a row after which the run stops all the same."""
    replay: str = ""
    """Folder of a run that stopped at a step that was not finite: runs that step again, with the
    options of that run where no others are given, and ends."""
    explain: bool = False
    """Show how each parameter is split over the devices, and why, and end."""
    explain_json: bool = False
    """The same as JSON."""
    seed: int = 0
    """Seed of initial weights, order of the data, dropout and sampling."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "save_every", "seed", "clip_norm"):
            at_least(self, name, 0)
        for name in ("epochs", "batch_size", "microbatches", "keep", "max_skipped"):
            if getattr(self, name) != "auto":
                at_least(self, name, 1)
        if self.on_nonfinite not in ("stop", "skip"):
            raise UserError(f"on_nonfinite {self.on_nonfinite!r} is not possible: stop or skip.")

    @property
    def too_many(self) -> int:
        """Steps in a row without a finite loss and gradient at which a run stops."""
        return self.max_skipped if self.on_nonfinite == "skip" else 1

    def settings(self) -> dict[str, Any]:
        """The options that the numbers of a run depend on."""
        names = [field.name for field in dataclasses.fields(TrainOptions)]
        return {name: getattr(self, name) for name in names if name not in FREE}

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of a whole run over this many examples."""
        return self.steps or self.epochs * math.ceil(examples / self.batch_size)


class Trainer:
    """Trains, evaluates and predicts with three functions on a mesh.

    Args:
      collate: examples -> dict of NumPy arrays with a leading example axis.
      loss: (params, batch, key) -> `Loss`, key None in evaluation; None: predict only.
      predict: (params, batch, keys) -> pytree of arrays with a leading example axis, or None.
      init: key -> params; or a pytree of arrays, which is copied; or the folder of a run, whose
        best checkpoint is read; or an object with `shapes()` and `load(shardings)`.
      optimizer: an optax transformation, or None: no training.
      mesh: from `make_mesh`.
      example: a few examples, collated for their shapes.
      options: the numbers of the run.
      overrides: path regex -> PartitionSpec, which wins over what `core.rules` infers.
      summarize: averages of metrics -> figures derived from them, which are logged beside them.
      whole_batch: the loss looks across rows and must see all rows of a step at once.
      folder: where metrics, curves and checkpoints go; None: to the console only.
      unit: what a weight of 1 stands for, such as "tokens", for the speed that is shown.
      show: the metrics shown in the progress bar.

    Raises:
      UserError: a function has the wrong signature or returns the wrong shapes; within seconds,
        before anything is compiled.
      Ended: the option `explain` was given, and this is the explanation.
    """

    def __init__(
        self,
        collate: CollateFn,
        loss: LossFn | None,
        predict: PredictFn | None,
        init: Any,
        optimizer: optax.GradientTransformation | None,
        mesh: Mesh,
        example: Examples,
        *,
        options: TrainOptions | None = None,
        overrides: Overrides | None = None,
        summarize: Callable[[Metrics], Metrics] | None = None,
        whole_batch: bool = False,
        folder: str | Path | None = None,
        unit: str = "examples",
        show: tuple[str, ...] = ("loss",),
    ):
        check_signatures(collate, loss, predict)
        self.options = options = options or TrainOptions()
        parts = microbatches(options, mesh)
        if whole_batch and parts > 1:
            raise UserError(
                "This loss looks across the rows of a batch, so it must see them at once: use "
                f"1 microbatch instead of {options.microbatches}."
            )
        self.mesh, self.unit, self.show = mesh, unit, show
        self.folder = Path(folder) if folder else None
        self.collate, self.loss, self.predict_fn = collate, loss, predict
        self.summarize = summarize or (lambda metrics: {})
        self.layout = Layout(mesh, options.batch_size, parts)
        self._flat = functools.cache(lambda rows: Layout(mesh, rows))
        self.dtype = compute_dtype(options.compute_dtype, mesh)

        shapes, load = _weights(init, stream(options.seed, INIT))
        known = explain.load(init, mesh) if isinstance(init, str | Path) else None
        self.inferred = infer(*self._traced(shapes, example), mesh, overrides, known)
        if options.explain or options.explain_json:
            raise Ended(self._explained(shapes))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.inferred.specs)
        whole = NamedSharding(mesh, PartitionSpec())
        self.state = initial_state(load(shardings), optimizer, shardings, whole)
        self.extra: Any = ()  # what a step given to fit carries besides the state
        self._sums_jit = jax.jit(self._batch_sums, out_shardings=whole)
        self._outputs_jit = jax.jit(self._outputs, out_shardings=whole)
        # On a CPU one thing after the other: for a few rows, threads cost more than they gain.
        in_turn = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        self._few_jit = jax.jit(
            self._few, out_shardings=whole, compiler_options=in_turn if is_cpu(mesh) else None
        )
        if optimizer is not None and loss is not None:
            like = floating(shapes, shardings)
            self.gradients = summed_gradients(
                self._sums, lambda grads: jax.lax.with_sharding_constraint(grads, like)
            )
            self.step = make_step(
                self.gradients, optimizer, options.seed, options.clip_norm, options.too_many
            )
            after = (jax.tree.map(lambda x: x.sharding, self.state), whole)
            self.step_jit = jax.jit(self.step, donate_argnums=0, out_shardings=after)

    def fit(
        self,
        train: Examples | Source | None = None,
        valid: Examples | None = None,
        score: Score | None = None,
        best: tuple[str, Literal["min", "max"]] | None = None,
        *,
        step: Iteration | None = None,
        extra: Any = (),
    ) -> dict[str, Any]:
        """Trains to the end of the run, evaluating and saving on the way.

        Where the folder holds checkpoints, the run goes on from the latest good one, and ends as
        if it had never stopped.

        Args:
          train: examples, or a function (epoch, params) that returns those of one pass. It may
            have `state()`, of dicts, lists, strings, numbers, None and NumPy arrays, and
            `restore(state)`, for what else its examples depend on. With a function, checkpoints
            are made where epochs end.
          valid: examples to evaluate, and to predict where there is a `score`.
          score: (outputs, examples) -> metrics of the predictions.
          best: a metric of the evaluation and "min" or "max": which checkpoint is the best one.
          step: in place of `train`, for what is compiled as a whole: a pure function
            (state, extra) -> ((state, extra), metrics) that makes its own batches and does some
            optimizer steps with `self.step`. States may be stacked along a first axis.
          extra: what it carries besides the state, a pytree of arrays; saved and restored with it,
            and afterwards in `self.extra`.

        Returns:
          {"steps", "seconds", "train", "valid", "best"}: the last three are metrics, the latest
          and the best ones.

        Raises:
          UserError: no optimizer, no examples, a folder that holds a run with other settings or
            only damaged checkpoints, or a loss that is not finite.
          Stopped: a signal asked for it, and all is saved.
          Ended: the option `replay` was given, and this is what it found.
        """
        if not hasattr(self, "step_jit"):
            raise UserError("This trainer only predicts: to fit, give it a loss and an optimizer.")
        if best is not None and (isinstance(best, str) or len(best) != 2):
            raise UserError(f'best={best!r} must be a metric and "min" or "max": ("loss", "min").')
        if self.options.replay:
            raise Ended(replay(self, Path(self.options.replay)))
        which = Best(*best) if best else None
        if (train is None) == (step is None):
            raise UserError("To fit, give either training data or a step that makes its own.")
        if train is not None:
            return Loop(self, train, valid, score, which).run()
        assert step is not None, "one of them is given"
        return CompiledLoop(self, step, extra, valid, score, which).run()

    def evaluate(self, examples: Examples) -> Metrics:
        """The exact weighted averages of loss and metrics over all examples, and what
        `summarize` makes of them.

        Raises:
          UserError: no loss, or no examples.
        """
        if self.loss is None:
            raise UserError("This trainer only predicts: to evaluate, give it a loss.")
        name = "evaluation data"
        rows = np.arange(some(examples, name))
        parts: list[Arrays] = []
        for batch in batches(examples, rows, self.layout, self.collate, name):
            parts.append(self._sums_jit(self.state.params, batch))
            # The device stays busy, but batches do not pile up on it.
            jax.block_until_ready(parts[-1 - AHEAD :][0])
        # Summed in double precision, so that the number of batches does not round.
        read = jax.device_get(parts)
        sums = {key: sum(float(part[key]) for part in read) for key in read[0]}
        weight = sums.pop("weight")
        means = {key: total / weight if weight else 0.0 for key, total in sums.items()}
        return self.figures(means | {"weight": weight})

    def predict(self, examples: Examples, collate: CollateFn | None = None) -> list[Any]:
        """The outputs of all examples, in order, on every process.

        Args:
          examples: any number of them, also none.
          collate: used in place of the trainer's own.

        Returns:
          One pytree of NumPy arrays per example.
        """
        name, outputs = "data to predict", list[Any]()
        everything, layout = np.arange(count(examples, name)), self._flat(self.options.batch_size)
        for batch in batches(examples, everything, layout, collate or self.collate, name):
            rows = everything[len(outputs) : len(outputs) + layout.batch_size]
            keys = layout.to_global(row_keys(self.options.seed, layout.place(rows)))
            out = jax.device_get(self._outputs_jit(self.state.params, batch, keys))
            outputs += [jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(rows))]
        return outputs

    def predict_step(
        self, params: Any, batch: Mapping[str, Any], keys: jax.Array | np.ndarray
    ) -> Any:
        """`predict` jitted, on a few collated rows, for loops such as rollouts.

        Args:
          params: the parameters, such as `trainer.state.params`.
          batch: arrays [B, ...], the same on every process; rows are padded to the devices.
          keys: [B] keys, which the caller makes, or their data [B, ...] as a NumPy array.

        Returns:
          A pytree of NumPy arrays [B, ...], on every process.
        """
        data = keys if isinstance(keys, np.ndarray) else np.asarray(jax.random.key_data(keys))
        out = self._few_jit(params, check_batch(batch, len(data)), data)
        return jax.tree.map(np.asarray, out)

    def figures(self, metrics: Metrics) -> Metrics:
        """Metrics, the loss first, and what `summarize` makes of them."""
        return {"loss": metrics["loss"]} | self.summarize(metrics) | metrics

    def _explained(self, shapes: Any) -> str:
        problems, mesh = self.inferred.problems, self.mesh
        rows = explain.rows(self.inferred, shapes, mesh)
        if self.options.explain_json:
            return json.dumps(explain.as_json(rows, problems, mesh), indent=1)
        return explain.table(rows, problems, mesh)

    def _sums(self, params: Any, rows: Batch, key: jax.Array | None) -> Arrays:
        assert self.loss is not None, "only called where there is one"
        return weighted_sums(self.loss(cast(params, self.dtype), rows, key), rows["row_mask"])

    def _batch_sums(self, params: Any, batch: Batch) -> Arrays:
        sums: Arrays = scan_sum(lambda _, rows: self._sums(params, rows, None), batch)
        return sums

    def outputs(self, params: Any, rows: Batch, keys: jax.Array) -> Any:
        """`predict`, pure and not jitted, usable under scan and vmap, in the type to compute in.

        Args:
          params: the parameters.
          rows: arrays [B, ...], with a boolean `row_mask` [B].
          keys: [B].

        Returns:
          A pytree of arrays [B, ...].
        """
        if self.predict_fn is None:
            raise UserError("This trainer has no predict function: give it one.")
        return self.predict_fn(cast(params, self.dtype), rows, keys)

    def _outputs(self, params: Any, batch: Batch, key_data: jax.Array) -> Any:
        """Outputs [B, ...] of a batch [1, B, ...] with the data of its keys [1, B, ...]."""
        rows, key_data = jax.tree.map(lambda x: x[0], (batch, key_data))
        return self.outputs(params, rows, jax.random.wrap_key_data(key_data))

    def _few(self, params: Any, batch: Batch, key_data: jax.Array) -> Any:
        """Outputs [B, ...] of rows [B, ...] with the data of their keys, all on every device."""
        layout = self._flat(len(key_data))

        def split(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, [(0, layout.width - len(x))] + [(0, 0)] * (x.ndim - 1), mode="edge")
            spread: jax.Array = jax.lax.with_sharding_constraint(padded[None], layout.sharding)
            return spread

        mask = jnp.arange(layout.width)[None] < len(key_data)
        rows = {name: split(x) for name, x in batch.items()} | {"row_mask": mask}
        out = self._outputs(params, rows, split(key_data))
        return jax.tree.map(lambda x: x[: len(key_data)], out)

    def _traced(self, params: Any, example: Examples) -> tuple[Callable[..., Any], Any, Any]:
        """Checks what loss and predict return on the shapes of one microbatch.

        Returns:
          The function that shardings are read from, and the shapes of its two arguments.
        """
        size, width = some(example, "example"), self.layout.width
        arrays = collated(self.collate, example, np.arange(width) % size, "example")
        batch = jax.eval_shape(lambda: {key: jnp.asarray(x) for key, x in arrays.items()})
        batch["row_mask"] = jax.ShapeDtypeStruct((width,), bool)
        params_like = jax.eval_shape(lambda tree: cast(tree, self.dtype), params)
        keys = jax.random.split(jax.random.key(0), width)
        if self.predict_fn is not None:
            out = _shapes_of("predict", self.predict_fn, params_like, batch, keys)
            check_outputs(out, width)
        if self.loss is None:
            assert self.predict_fn is not None, "checked with the signatures"
            predict = self.predict_fn
            return (lambda p, b: predict(cast(p, self.dtype), b, keys)), params, batch
        for key in (None, keys[0]):
            check_loss(_shapes_of("loss", self.loss, params_like, batch, key), width)
        return (lambda p, b: self._sums(p, b, keys[0])["loss"]), params, batch


def _shapes_of(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, as shapes; a failure names it, the line, and the batch it got."""
    try:
        return jax.eval_shape(fn, *args)
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename][-1]
        batch = args[1] if len(args) > 1 else {}
        got = ", ".join(f"{key}: {x.dtype}{list(x.shape)}" for key, x in batch.items())
        raise UserError(
            f"{name} failed at {own.filename}, line {own.lineno}, with {type(error).__name__}: "
            f"{error}" + (f" (The batch that collate makes is {got}.)" if got else "")
        ) from error


def _weights(init: Any, key: jax.Array) -> tuple[Any, Callable[[Any], Any]]:
    """The shapes of the weights that `init` stands for, and a function shardings -> weights.

    Floating-point weights are kept in single precision at least; no device and no host ever holds
    the whole of weights that are split.
    """
    if isinstance(init, str | Path):
        init = Saved(init)
    if hasattr(init, "shapes") and hasattr(init, "load"):
        shapes, load = init.shapes(), init.load
        return jax.eval_shape(_master, shapes), lambda shardings: _master(load(shardings))

    def make(given: Any) -> Any:
        # Arrays are copied, since a step donates its state: the caller's must stay the caller's.
        return _master(init(given) if callable(init) else jax.tree.map(jnp.copy, given))

    given = key if callable(init) else init
    shapes = _shapes_of("init", make, given)
    return shapes, lambda shardings: jax.jit(make, out_shardings=shardings)(given)


def _master(params: Any) -> Any:
    return jax.tree.map(lambda p: at_least_float32(p) if is_floating(p) else p, params)


def microbatches(options: TrainOptions, mesh: Mesh) -> int:
    """The number of microbatches that an option stands for.

    "auto" on CPU gives each device one row of a microbatch; where the batch does not divide so, the
    microbatches are as large as they can be without a second row on any device.
    """
    if options.microbatches != "auto":
        return options.microbatches
    if not is_cpu(mesh):
        return 1
    size = options.batch_size
    divisors = (parts for parts in range(1, size + 1) if size % parts == 0)
    return next(parts for parts in divisors if size // parts <= row_shards(mesh))


def compute_dtype(name: str, mesh: Mesh) -> Any:
    """The type that an option stands for; None computes in the type of the weights."""
    if name == "auto":
        return None if is_cpu(mesh) else jnp.bfloat16
    if name not in ("bfloat16", "float32", "float64"):
        raise UserError(
            f"compute_dtype {name} is not supported: use auto, bfloat16, float32 or float64."
        )
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise UserError("compute_dtype float64 needs double precision: set JAX_ENABLE_X64=1.")
    return jnp.dtype(name)
