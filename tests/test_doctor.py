"""The command ``embedgeo doctor``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from embedgeo import GeometryMonitor, describe
from embedgeo.cli import main
from embedgeo.results.folder import SweepFolder
from tests.models import VOCABULARY, gpt_neox, linear_block, t5
from tests.sweep.conftest import hub  # noqa: F401 (a fixture)
from tests.sweep.hub_server import Hub
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import SIZES, TEXT, saved_files, tokenizer_files, write_files

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])


FEW_ROWS = (
    "doctor",
    "tests.models:gpt_neox",
    "--metrics",
    "auto",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
)


def test_the_command_prints_the_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW_ROWS]) == 0
    expected = str(describe(GeometryMonitor(metrics="auto"), gpt_neox(), batch_size=2, seq_len=16))
    printed, errors = capsys.readouterr()
    assert printed.splitlines() == expected.splitlines()
    assert errors == ""


def test_a_folder_is_described_by_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, said in (
        (gpt_neox(), "block.00 … block.02  "),
        (t5(), "decoder.block.00 … decoder.block.02  "),
    ):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        options = ["--layers", "*block.*,*final_norm"]
        assert main(["doctor", str(tmp_path), *options, "--batch-size", "3", "--window", "2"]) == 0
        printed = capsys.readouterr().out
        assert said in printed
        assert "embed  " not in printed
        # the positions that it has, if it says so
        length = {"GPTNeoXForCausalLM": 64}.get(type(model).__name__, 512)
        assert f"rows       {6 * length:,} a measurement" in printed
    (tmp_path / "config.json").unlink()
    capsys.readouterr()
    assert main(["doctor", str(tmp_path)]) == 2
    assert "must be a folder with a config.json" in capsys.readouterr().err


CONFIGURATIONS = {
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox"},
    "Gemma2ForCausalLM": {"model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 2},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_key_value_heads": 2},
    "GptOssForCausalLM": {"model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 8},
    "BertForMaskedLM": {"model_type": "bert"},
}


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_a_trainers_checkpoint_and_a_mixture_of_experts_are_run_without_memory(
    architecture: str, tmp_path: Path
) -> None:
    config = {
        **CONFIGURATIONS[architecture],
        "architectures": [architecture],
        "use_cache": False,
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 32, "vocab_size": 300, "max_position_embeddings": 48},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "embedgeo.cli", "doctor", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip().endswith("No warnings."), done.stdout
    assert f"mask       attention_mask of {architecture}" in done.stdout
    assert "rows       384 a measurement" in done.stdout
    assert done.stderr == ""


def test_an_encoder_without_a_head_is_described_as_a_sweep_loads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = BertForMaskedLM(BertConfig(**SIZES, vocab_size=300, max_position_embeddings=64)).bert
    # a pooler, which is not measured, is left out with it
    saved = saved_files(body.save_pretrained) | tokenizer_files("bert")
    model = write_files(tmp_path / "bare", saved)
    assert main(["doctor", str(model)]) == 0
    count = sum(weight.numel() for weight in body.parameters())
    assert f"BertModel, {count:,} parameters" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("\n\n".join(TEXT))
    text = str(tmp_path / "text.txt")
    assert sweep(str(model), out=str(tmp_path / "out"), text=text, num_tokens=48, seq_len=16) == 0
    facts = SweepFolder(tmp_path / "out").facts("bare")
    assert (facts["model_class"], facts["num_parameters"]) == ("BertModel", str(count))


class Shifted(nn.Module):
    """A table of positions alone tells how many there are; a step of training takes more than
    token ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.shift = nn.Parameter(torch.zeros(8, 8))
        self.pos_emb = nn.Parameter(torch.zeros(1, 40, 8))
        self.blocks = nn.ModuleList(linear_block(8) for _ in range(2))
        self.head = nn.Linear(8, 50)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.tokens(batch["ids"])
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(("name", "length"), [("Shifted", 40), ("NanoGPT", 2 * VOCABULARY)])
def test_sequences_are_as_long_as_a_table_of_positions(
    name: str, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    module = "tests.test_doctor" if name == "Shifted" else "tests.models"
    assert main(["doctor", f"{module}:{name}", "--batch-size", "3"]) == 0
    assert f"rows       {3 * length:,} a measurement" in capsys.readouterr().out


def test_advice_names_options_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def advice(*arguments: str) -> str:
        assert main(["doctor", *arguments]) == 0
        return " ".join(capsys.readouterr().out.split("\n\n")[-1].split())

    cannot_run = advice("tests.test_doctor:Shifted")
    assert (
        "Name what makes a model that takes token ids, as package.module:make_model" in cannot_run
    )
    without_tables = advice("tests.models:gpt_neox", "--batch-size", "10000000", "--ranks", "9")
    unreached = advice("tests.models:gpt_neox", "--layers", "*drop*,blocks")
    for printed in (cannot_run, without_tables, unreached):
        assert not re.search(r"\b(layers|metrics)=", printed), printed


def test_a_repository_is_described_without_its_weights(
    hub: Hub,  # noqa: F811 (the fixture's)
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpt_neox().config.save_pretrained(tmp_path)
    files = {
        "config.json": (tmp_path / "config.json").read_bytes(),
        "model.safetensors": b"never read",
    }
    hub.add("lab/tiny", "main", files)
    assert main(["doctor", "lab/tiny", "--jackknife", "2"]) == 0
    assert "token ids  gpt_neox.embed_in" in capsys.readouterr().out
    assert not hub.downloads(".safetensors")


def test_the_configuration_of_a_lightning_run_is_described_with_its_monitors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = yaml.safe_load((ROOT / "examples" / "pretrain.yaml").read_text(encoding="utf-8"))
    assert (
        main(
            ["doctor", "examples/pretrain.yaml", "--model-class", "examples.pretrain.LanguageModel"]
        )
        == 0
    )
    first = capsys.readouterr().out
    assert "mean(last4)" in first
    assert "final_norm" not in first
    asked["model"] = {"class_path": "examples.pretrain.LanguageModel", "init_args": asked["model"]}
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(asked))
    assert main(["doctor", str(tmp_path / "whole.yaml")]) == 0
    assert capsys.readouterr().out == first
    assert (
        main(["doctor", str(tmp_path / "whole.yaml"), "--layers", "blocks", "--seq-len", "64"]) == 0
    )
    overridden = capsys.readouterr().out
    assert "final_norm" in overridden
    assert "rows       512 a measurement" in overridden
    named = {"class_path": "GeometryMonitor", "init_args": {"layers": "embed", "window": 2}}
    asked["trainer"]["callbacks"] = ["embedgeo.GeometryMonitor", named]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(asked))
    assert main(["doctor", str(tmp_path / "short.yaml"), "--batch-size", "12"]) == 0
    by_both = capsys.readouterr().out
    assert "rows       6,144 a measurement" in by_both
    assert "rows       12,288 a measurement" in by_both


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["./nowhere"],
            "model_or_config must be a local path that exists or a repository on the Hub",
        ),
        (["tests.models:nothing"], "as package.module:make_model; got 'tests.models:nothing'"),
        (["tests.models:token_batch"], "it makes a dict"),
        (["examples/pretrain.yaml"], "Name the class by --model-class"),
        (["configs/pythia.yaml"], "got model: 'EleutherAI/pythia-70m'"),
        (
            ["examples/pretrain.yaml", "--model-class", "examples.pretrain.Nothing"],
            "must make a model and its monitors",
        ),
        (["tests.models:gpt_neox", "--layers", "nonsense"], "layers='nonsense' matches no layer"),
        (["tests.test_describe:WithoutBlocks"], "such as table, head, first"),
        (
            ["tests.models:gpt_neox", "--metrics", "no.such"],
            "metrics must be auto, or name a function",
        ),
        (
            ["tests.models:gpt_neox", "--metrics", "os.getcwd"],
            "cannot start on this model (TypeError",
        ),
        (
            ["tests.models:gpt_neox", "--seq-len", "0"],
            "batch_size, seq_len and ranks must be positive",
        ),
    ],
)
def test_what_cannot_start_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("embedgeo: error: ")
    assert said in line
    assert captured.out == ""


MODULE = """
model: {class_path: examples.pretrain.LanguageModel,
  init_args: {vocab_size: 64, hidden_size: 8, num_heads: 2}}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [1", "run.yaml must be a YAML file; it is not (ParserError"),
        (
            MODULE
            + "trainer: {callbacks: {class_path: embedgeo.GeometryMonitor, init_args: {every: 3}}}",
            "'every'",
        ),
        (
            MODULE + "trainer: {callbacks: {class_path: GeometryMonitor, init_args: {window: x}}}",
            "must be an integer",
        ),
        (
            MODULE + "trainer: {callbacks: {class_path: GeometryMonitor, init_args: {layers: x}}}",
            "layers='x'",
        ),
    ],
)
def test_a_wrong_file_is_one_line_and_status_2(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["doctor", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("embedgeo: error: ")
    assert said in line
