"""What the commands do with the extras report and sweep, and what they name beyond these;
`smoke.py` runs it there.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import embedgeo
from embedgeo.cli import main as embedgeo_command
from embedgeo.text import builtin_corpus, train_tokenizer


def made(folder):
    """A checkpoint of a tiny model."""
    tokenizer = train_tokenizer(builtin_corpus()[:20], 300)
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, num_hidden_layers=2, **size
    )
    for saved in (GPTNeoXForCausalLM(config), tokenizer):
        saved.save_pretrained(folder / "step0")
    return str(folder)


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
    model, out = made(folder / "model"), str(folder / "sweep")
    asked = f"sweep --num-tokens 2048 --seq-len 64 --device cpu --model {model}"
    with_tables = "--token-tables true --save-samples true --out"
    assert embedgeo_command([*asked.split(), *with_tables.split(), out]) == 0
    assert embedgeo_command(["report", out]) == 0
    page = Path(out, "report", "index.html").read_text()
    assert "anisotropy" in page
    assert "data:image/" in page
    assert len(embedgeo.load_results(out))
    assert embedgeo.load_sample(out, "step0").layers
    assert embedgeo_command(["check", "--model", model]) == 0
    refused("accelerate", *asked.replace("--device cpu ", "").split(), "--device-map", "auto")
    refused("ray", *asked.split(), "--on", "ray")
    web = ("--text", "hf://datasets/lab/web", "--out", str(folder / "other"))
    refused("datasets", *asked.split(), *web)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("the extras report and sweep suffice for their commands")
