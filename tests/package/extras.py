"""What the commands do with the extras report and sweep, and what they name beyond these;
`smoke.py` runs it there.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import embedgeo
from embedgeo.cli import main as embedgeo_command
from embedgeo.text import builtin_corpus, train_tokenizer


def made(folder):
    """Two checkpoints of a tiny model."""
    tokenizer = train_tokenizer(builtin_corpus()[:20], 300)
    size = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
    }
    for step in (0, 1):
        torch.manual_seed(step)
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **size)
        )
        for saved in (model, tokenizer):
            saved.save_pretrained(folder / f"step{step}")
    return folder


def refused(extra, *arguments):
    """The command answers with one line, which has the command that installs the extra, and status
    2.
    """
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        status = embedgeo_command(arguments)
    assert status == 2, (arguments, status)
    line = rf"embedgeo: error: .* needs .*not installed: pip install 'embedgeo\[{extra}\]'\n"
    assert re.fullmatch(line, stderr.getvalue()), stderr.getvalue()


def main(folder):
    model, out = made(folder / "model"), folder / "sweep"
    asked = (
        "sweep",
        "--model",
        str(model),
        "--num-tokens",
        "2048",
        "--seq-len",
        "64",
        "--trainer.accelerator",
        "cpu",
    )
    assert (
        embedgeo_command(
            [*asked, "--token-tables", "true", "--save-samples", "true", "--out", str(out)]
        )
        == 0
    )
    assert embedgeo_command(["report", str(out)]) == 0
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert "anisotropy" in page
    assert "data:image/" in page
    assert len(embedgeo.load_results(out))
    assert embedgeo.load_sample(out, embedgeo.load_results(out)["revision"].iloc[0]).layers
    (folder / "text.txt").write_text("\n".join(builtin_corpus()[:20]), encoding="utf-8")
    paper = (
        "reproduce",
        "razzhigaev2024",
        "--model",
        str(model),
        "--steps",
        "all",
        "--num-tokens",
        "2048",
    )
    fewer = (
        "--seq-len",
        "64",
        "--anisotropy-batch",
        "512",
        "--id-batches",
        "2",
        "--trainer.accelerator",
        "cpu",
    )
    given = ("--text", str(folder / "text.txt"), "--out", str(folder / "paper"))
    assert embedgeo_command([*paper, *fewer, *given]) == 0
    assert "does not hold" in (folder / "paper" / "reproduce" / "razzhigaev2024.html").read_text(
        encoding="utf-8"
    )
    assert embedgeo_command(["check", "--model", str(model)]) == 0
    assert embedgeo_command(["doctor", str(model / "step0")]) == 0
    refused("accelerate", *asked, "--device-map", "auto")
    refused("ray", *asked, "--on", "ray")
    refused("datasets", *asked, "--text", "hf://datasets/lab/web", "--out", str(folder / "other"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("the extras report and sweep suffice for their commands")
