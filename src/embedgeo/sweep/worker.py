"""What measures checkpoints: fetches one, loads it, measures it. It knows of no results of others and writes none."""

import gc
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.fabric import Fabric

from embedgeo.checkpoints import loading
from embedgeo.sweep.downloads import Downloads
from embedgeo.sweep.measure import Measured, measure
from embedgeo.sweep.plan import Planned
from embedgeo.sweep.probe_text import ProbeText, require_vocabulary
from embedgeo.sweep.processes import all_agree, from_local_zero
from embedgeo.sweep.settings import SweepSettings

_PACKAGES = ("embedgeo", "huggingface_hub", "lightning", "torch", "torchmetrics", "transformers")
"""Packages that the numbers depend on."""


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {name: version(name) for name in _PACKAGES}


@dataclass
class Worker:
    """One process of those that measure a checkpoint together: local rank 0 downloads for its node.

    Args:
        fabric: the processes and their devices.
        settings: of the sweep.
        texts: what to measure on, by `Checkpoint.model`.
        downloads: where to.
    """

    fabric: Fabric
    settings: SweepSettings
    texts: Mapping[str, ProbeText]
    downloads: Downloads
    _loader: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1), init=False)
    _loads: dict[str, Future[loading.LoadedModel]] = field(default_factory=dict, init=False)

    def measured(self, planned: Planned, upcoming: Callable[[], Planned | None]) -> Measured:
        """Measure a checkpoint; every rank must call this, and returns the same.

        Args:
            planned: the checkpoint.
            upcoming: chooses the next one, to be fetched meanwhile, once this one is loaded, and loaded while the
                metrics of this one, whose weights have gone by then, are computed and written.

        Raises:
            Exception: of any kind: it cannot be fetched, loaded or measured.
        """
        try:
            path = None
            with all_agree(self.fabric):
                if self.fabric.local_rank == 0:
                    path = self.downloads.start(planned).result()
            path = from_local_zero(self.fabric, path)
            assert path is not None
            with all_agree(self.fabric):
                loaded = self._loaded(planned, path)
                require_vocabulary(loaded.model, self._text(planned).token_ids)
            following = self.fabric.broadcast(upcoming())
            if self.fabric.local_rank == 0 and following is not None:
                self.downloads.start(following)
            return measure(
                self.fabric, loaded, self._text(planned), self.settings, partial(self._load_ahead, following)
            )
        finally:
            self.downloads.remove(planned)

    def load(self, planned: Planned, path: Path) -> loading.LoadedModel:
        """The model of a checkpoint, from its folder or file."""
        dtype = getattr(torch, self.settings.dtype)
        if path.is_file():
            assert self.settings.model_class is not None
            return loading.load_lightning(path, self.settings.model_class, dtype=dtype)
        assert planned.contents is not None
        if self.settings.device_map is not None:
            gc.collect()  # accelerate's hooks keep the model before this one in reference cycles
        return loading.load_model(
            path,
            planned.contents,
            dtype=dtype,
            trust_remote_code=self.settings.trust_remote_code,
            device_map=self.settings.device_map,
            offload_folder=self.downloads.offload_folder(planned),
        )

    def _loaded(self, planned: Planned, path: Path) -> loading.LoadedModel:
        """The model that was loaded ahead, or loaded now: never two at a time, for transformers patches torch."""
        ahead = self._loads.pop(planned.name, None)
        wait(self._loads.values())
        self._loads.clear()
        return self.load(planned, path) if ahead is None else ahead.result()

    def _load_ahead(self, planned: Planned | None) -> None:
        """Begin to load a checkpoint, where that changes nothing for the metrics that are computed meanwhile.

        Loading sets torch's default dtype for all threads; and code of the user's may set anything.
        """
        own_code = self.settings.model_class is not None or self.settings.trust_remote_code
        in_place = self.settings.device_map is None and self.fabric.world_size == 1
        if planned is not None and in_place and not own_code and self.settings.dtype == "float32":
            fetched = self.downloads.start(planned)
            self._loads[planned.name] = self._loader.submit(lambda: self.load(planned, fetched.result()))

    def _text(self, planned: Planned) -> ProbeText:
        return self.texts[planned.checkpoint.model]
