"""The command ``embedgeo doctor``."""

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import nn

from embedgeo.capture.structure import measured_model
from embedgeo.checkpoints import hub
from embedgeo.checkpoints.loading import described_model, import_named, requiring, stated_positions
from embedgeo.checkpoints.sources import is_local, require_source
from embedgeo.formatting import reason
from embedgeo.studies.commands import DoctorSettings
from embedgeo.studies.describe import GIVE_BATCH, describe
from embedgeo.sweep import SweepSettings
from embedgeo.sweep.processes import muted_libraries
from embedgeo.training.lightning import GeometryMonitor

# a larger model is given no memory for its weights if it can be made without
_MOST_PARAMETERS = 100_000_000
_METRICS_RULE = (
    "metrics must be auto, or name a function of a layer's width as package.function, in a module "
    "that can be imported"
)
_GIVE_MODEL = (
    "Name what makes a model that takes token ids, as package.module:make_model; in Python "
    "embedgeo.describe takes a batch."
)
# which a file gives by their names
_FUNCTIONS = ("metrics", "probe_forward", "token_ids", "mask", "word_ids")


def run_doctor(settings: DoctorSettings) -> None:
    """Describe what the monitors of a configuration, or one of the given options, would do on a
    model.
    """
    with muted_libraries():
        source = settings.model_or_config
        path = Path(source).expanduser()
        monitors: list[dict[str, Any]] = [{}]
        if path.suffix in (".yaml", ".yml"):
            model, monitors = _configured(path, settings.model_class)
        elif "/" not in source and (":" in source or "." in source) and not path.exists():
            model = _model_by_name(source)
        else:
            model = _pretrained(source, trust_remote_code=settings.trust_remote_code)
        given: dict[str, Any] = {
            "rows": settings.rows,
            "window": settings.window,
            "jackknife": settings.jackknife,
        }
        options = {name: value for name, value in given.items() if value is not None}
        if settings.layers is not None:
            options["layers"] = SweepSettings("", layers=settings.layers).layer_patterns
        if settings.metrics is not None and settings.metrics != "auto":
            with requiring(_METRICS_RULE, settings.metrics):
                options["metrics"] = import_named(settings.metrics)
        seq_len = settings.seq_len
        if seq_len is None:
            seq_len = min(stated_positions(measured_model(model)) or 512, 512)
        sizes = {
            "batch_size": settings.batch_size,
            "seq_len": seq_len,
            "ranks": settings.ranks,
        }
        texts = [_described(model, {**arguments, **options}, sizes) for arguments in monitors]
    print("\n\n".join(texts), flush=True)


def _described(model: nn.Module, arguments: dict[str, Any], sizes: dict[str, int]) -> str:
    try:
        description = describe(GeometryMonitor(**arguments), model, **sizes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of the arguments in a file, or of a function that they name
        raise ValueError(
            f"a GeometryMonitor of these options cannot start on this model ({reason(error)})."
        ) from error
    if not description.layers:
        raise ValueError(description.warnings[0])
    return str(replace(description, warnings=tuple(map(_on_command_line, description.warnings))))


def _on_command_line(advice: str) -> str:
    """Advice that names options in place of arguments."""
    with_values = re.sub(r"\b(layers|metrics)=(?=\w)", r"--\1 ", advice)
    return re.sub(r"\b(layers|metrics)=", r"--\1", with_values).replace(GIVE_BATCH, _GIVE_MODEL)


def _pretrained(source: str, *, trust_remote_code: bool) -> nn.Module:
    """The model of a repository or a folder, by its ``config.json`` alone, without memory for its
    weights.
    """
    require_source("model_or_config", source)
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(source).expanduser()
        if not is_local(source):
            commits = hub.list_revisions(source)
            commit = commits.get("main") or next(iter(commits.values()), None)
            if commit is None:
                raise FileNotFoundError(f"model_or_config must have a branch; {source} has none.")
            names = ["config.json", *(["*.py"] if trust_remote_code else [])]
            folder = hub.fetch_small(source, commit, names, Path(cache))
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                "model_or_config must be a folder with a config.json, or a YAML file, or name a "
                f"function; {folder} has none. Of a folder of checkpoints give one of them."
            )
        return described_model(folder, trust_remote_code=trust_remote_code)


def _model_by_name(name: str) -> nn.Module:
    """The model that a function or a class makes without arguments, or a model itself, by its
    name.
    """
    rule = (
        "model_or_config must name what makes a torch module without arguments, as "
        "package.module:make_model"
    )
    with requiring(rule, name):
        make = import_named(name.replace(":", "."))
        model = make if isinstance(make, nn.Module) else _small_or_empty(make)
        if not isinstance(model, nn.Module):
            raise TypeError(f"it makes a {type(model).__name__}")
    return model


def _small_or_empty(make: Callable[[], Any]) -> Any:
    """The result of ``make``; a model of many parameters on the meta device, if it can be made
    there.
    """
    try:
        with torch.device("meta"):
            model = make()
        if sum(weight.numel() for weight in model.parameters()) > _MOST_PARAMETERS:
            return model
    except Exception:  # it needs values: it is made in memory, or says by itself what is wrong
        pass
    return make()


def _configured(path: Path, model_class: str | None) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model and the arguments of the monitors of a LightningCLI's file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path.name} must be a YAML file; it is not ({reason(error)})."
        ) from error
    model = content.get("model") if isinstance(content, dict) else None
    has_class = isinstance(model, dict) and "class_path" in model
    if isinstance(model, str) or not (has_class or model_class):
        raise ValueError(
            f"{path.name} must be the file of a LightningCLI, with model: class_path: and "
            f"init_args:; got {'no model' if model is None else f'model: {model!r}'}. Name the "
            "class by --model-class package.module.Class if the script does, or give the model "
            "itself."
        )
    try:
        module = _small_or_empty(lambda: _instance(model or {}, None if has_class else model_class))
        monitors = list(_monitors((content.get("trainer") or {}).get("callbacks")))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{path.name} must make a model and its monitors; it does not ({reason(error)})."
        ) from error
    return module, monitors or [{}]


def _instance(model: dict[str, Any], class_name: str | None) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    if class_name is None:
        parser.add_subclass_arguments(LightningModule, "model")
        import_named(model["class_path"])  # puts the working directory on the path
    else:
        parser.add_class_arguments(import_named(class_name.replace(":", ".")), "model")
    return parser.instantiate(parser.parse_object({"model": model}))["model"]


def _monitors(callbacks: Any) -> Iterator[dict[str, Any]]:
    """The arguments of the monitors among callbacks, with functions in place of their names."""
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        named = callback if isinstance(callback, dict) else {"class_path": callback}
        if str(named.get("class_path")).rpartition(".")[2] == GeometryMonitor.__name__:
            arguments = dict(named.get("init_args") or {})
            for key in _FUNCTIONS:
                if isinstance(name := arguments.get(key), str) and name != "auto":
                    arguments[key] = import_named(name)
            yield arguments
