"""Ranks that have a part of a model: shards, and the stages of a pipeline."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from embedgeo.capture.calls import watched_calls
from embedgeo.capture.meshes import STAGES, group_along
from embedgeo.capture.probe import Probe
from embedgeo.capture.structure import (
    Part,
    contains_any,
    find_stack,
    is_callable,
    measured_model,
    module_names,
    unwrapped,
)
from embedgeo.capture.torch_names import is_flattened, running_stage, shard_again
from embedgeo.formatting import listed, reason
from embedgeo.functional.distributed import (
    OwnGroup,
    all_gather_object,
    current_rank,
    num_ranks,
    together,
)
from embedgeo.geometry import Geometry
from embedgeo.results.records import Record

T = TypeVar("T")


def require_same_modules(geometry: Geometry, ranks: OwnGroup) -> None:
    """Raise ValueError if ranks have models of other modules, but for what is inside of blocks and
    is not measured, such as experts of their own; each of them must call this.
    """
    stack = find_stack(measured_model(geometry.model))
    blocks = stack.blocks if stack else []
    inside = {module for block in blocks for module in block.modules()} - {*blocks}
    modules = module_names(geometry.model).items()
    names = [name for name, module in modules if module not in inside]
    text = " ".join([*names, *(layer.name for layer in geometry.layers)])
    digest = blake2b(text.encode()).hexdigest()
    if len({*all_gather_object(digest, ranks)}) > 1:
        raise ValueError(
            "model must have the same modules on every rank; they differ, as those of pipeline "
            "stages do. Give device_mesh= a mesh with the pipeline's dimension, named pp."
        )


def run_inside(model: nn.Module, module: nn.Module, call: Callable[[], object]) -> None:
    """Run ``call``, which calls a module inside the model, in place of the forward pass of the
    outermost FSDP module around it.

    That one gathers its parameters then. The module that FSDP runs first is its root for good.
    """
    kinds = FSDPModule | FullyShardedDataParallel
    sharded = [each for each in model.modules() if isinstance(each, kinds)]
    known = {weight for each in sharded for weight in each.parameters()}
    if any(map(is_flattened, {*model.parameters()} - known)):
        raise ValueError(
            f"model must be the one that FSDP has wrapped; got a {type(model).__name__} inside of "
            "it. Give the monitor the wrapped model, as the loop calls it."
        )
    around = [each for each in sharded if contains_any(each, [module])]
    outer = max(around, key=lambda each: len([*each.modules()]), default=module)
    if outer is module:
        call()
    else:
        _call_instead(outer, unwrapped(outer), call)


def _call_instead(outer: nn.Module, module: nn.Module, call: Callable[[], object]) -> None:
    """Call a wrapper around a module, in which ``call`` runs in place of the module's forward."""
    forward = module.forward

    def redirected(*args: Any) -> None:
        module.forward = forward
        call()

    module.forward = redirected
    try:
        outer()
    finally:
        module.forward = forward


@contextmanager
def kept_sharded(model: nn.Module) -> Iterator[None]:
    """Context after which FSDP modules that were sharded are sharded again, also if it raises.

    A root stays gathered until a backward pass. Until then its forward pass ignores changes of the
    sharded weights.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [_own_parameters(module) for module in modules]
    undo = shard_again(model)
    try:
        yield
    finally:
        undo()
        for module, parameters in zip(modules, before, strict=True):
            if _own_parameters(module) != parameters:
                module.reshard()
            if _own_parameters(module) != parameters:  # its forward pass has raised
                with suppress(Exception):  # hooks of others get no output
                    _call_instead(module, module, lambda: None)  # it leaves its forward state
                module.reshard()


def _own_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that an FSDP module shards itself: those of no FSDP module inside it."""
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    others = {weight for each in inside if each is not module for weight in each.parameters()}
    return {*module.parameters()} - others


class PipelineStage:
    """One stage of a pipeline, which is given a batch cut along its first axis into microbatches,
    in order.
    """

    def __init__(self, model: nn.Module, stages: OwnGroup, ranks: OwnGroup) -> None:
        self.ranks = ranks  # that have this stage
        self.is_part = num_ranks(stages) > 1
        self._stages = stages  # the ranks of the stages of one model, in forward order
        self._model = unwrapped(model)
        self._attached = ExitStack()
        self._num_stages: int | None = None  # in the pipeline that has run it

    @classmethod
    def on(cls, mesh: DeviceMesh, model: nn.Module) -> "PipelineStage | None":
        """The stage on this rank; None if the mesh has no pipeline. Every rank must call this."""
        along = [i for i, name in enumerate(mesh.mesh_dim_names or ()) if STAGES.fullmatch(name)]
        if not along:
            return None
        stages = group_along(mesh, along)
        ranks = group_along(mesh, [i for i in range(mesh.ndim) if i not in along])
        if not (isinstance(model, nn.Module) and is_callable(model)):
            raise TypeError(
                f"model must be the one stage that this rank has, a module that is called; got "
                f"{type(model).__name__}. "
                "Where a schedule gives each rank several stages, sweep over the checkpoints."
            )
        return cls(model, stages, ranks)

    def attach(self, probe: Probe, batch: Any) -> None:
        """Cut what the probe is given of the batch now, in each forward pass, to the rows of the
        microbatch.

        Stages after the first see hidden states alone: the probe gets their token ids from a
        Hugging Face batch.
        """
        if probe.token_ids is None and probe.word_ids is None and current_rank(self._stages):
            probe.token_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        names = ("token_ids", "mask", "word_ids")
        whole = {name: tensor for name in names if (tensor := getattr(probe, name)) is not None}
        num_seen = 0

        @contextmanager
        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            nonlocal num_seen
            stage_run = running_stage()
            self._num_stages = None if stage_run is None else stage_run.num_stages
            sizes = (
                len(value)
                for value in (*args, *kwargs.values())
                if isinstance(value, Tensor) and value.ndim
            )
            if not probe.should_skip():
                first = num_seen
                num_seen += next(sizes, 0)
                for name, tensor in whole.items():
                    setattr(probe, name, tensor[first:num_seen])
            yield

        self.detach()
        self._attached.enter_context(watched_calls(self._model, cut))

    def detach(self) -> None:
        """Undo `attach`."""
        self._attached.close()

    def end(self) -> None:
        """Close the connections to the other ranks."""
        for group in (self.ranks, self._stages):
            group.end()

    def make_geometry(self, make: Callable[..., Geometry]) -> Geometry:
        """Make the `Geometry` of this stage's layers, named as in the whole model; every rank must
        call this.

        ``make`` is given the blocks that the stage has, and what joins it with others, where there
        are any.
        """
        if not self.is_part:
            return make()
        before = [0, *accumulate(self._gathered(lambda: _num_blocks(self._model)))]
        part = Part(before[current_rank(self._stages)], before[-1])
        made: list[Geometry] = []

        def own_names() -> list[str]:
            made.append(make(part=part, stage_group=self.ranks, join_stages=self._join))
            return [layer.name for layer in made[0].layers]

        names = [name for of_stage in self._gathered(own_names) for name in of_stage]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"layers must have other names on each stage of a pipeline; several have "
                f"{listed(twice)}."
            )
        if not names:
            raise ValueError(
                f"layers={made[0].settings['layers']!r} matches no layer of any stage of the "
                f"pipeline."
            )
        return made[0]

    def _join(self, num_layers: int, make: Callable[[], list[Record]]) -> list[Record]:
        """The records of all stages, as those of the whole model; every rank must call this."""

        def of_this_stage() -> tuple[int, list[Record]]:
            records = make()
            if self._num_stages not in (None, num_ranks(self._stages)):
                raise ValueError(
                    f"a pipeline must have one stage a rank; got {self._num_stages} stages on "
                    f"{num_ranks(self._stages)} ranks, as interleaved schedules have. Sweep over "
                    f"the checkpoints."
                )
            return num_layers, records

        every = self._gathered(of_this_stage)
        for (_, before), (_, after) in pairwise(every):
            _require_same_rows(before, after)
        firsts = accumulate((count for count, _ in every), initial=0)
        return [
            Record(**{**record, "layer_index": record["layer_index"] + first})
            for first, (_, records) in zip(firsts, every, strict=False)
            for record in records
        ]

    def _gathered(self, make: Callable[[], T]) -> list[T]:
        """Gather what ``make`` returns on each stage; an exception on one is raised on all of
        them.
        """
        error: Exception | None = None
        made: T | None = None
        try:
            made = make()
        except Exception as caught:
            error = caught
        with together(self._stages):
            every: list[Any] = all_gather_object(
                (made, "" if error is None else reason(error)), self._stages
            )
        if error is not None:
            raise error
        for number, (_, why) in enumerate(every):
            if why:
                raise RuntimeError(f"it failed on stage {number} of the pipeline: {why}")
        return [value for value, _ in every]


def _num_blocks(model: nn.Module) -> int:
    stack = find_stack(measured_model(model))
    if stack is None:
        raise ValueError(
            f"each stage of a pipeline must have transformer blocks; found none in "
            f"{type(model).__name__}."
        )
    return len(stack.blocks)


def _require_same_rows(before: list[Record], after: list[Record]) -> None:
    last, first = (
        [
            record
            for record in records
            if record["metric"] == "n" and record["layer"].startswith("block.")
        ]
        for records in (before, after)
    )
    if last and first and last[-1]["value"] != first[0]["value"]:
        raise ValueError(
            f"the stages of a pipeline must count the same rows; layer {last[-1]['layer']!r} has "
            f"{last[-1]['value']:.0f}, layer {first[0]['layer']!r} {first[0]['value']:.0f}. Give "
            "token_ids= and mask=, functions of the batch, and the batch on every rank."
        )
