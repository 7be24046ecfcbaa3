"""Monitors and sweeps say which few rows make the numbers of their first measurement."""

from collections import Counter
from copy import deepcopy

from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from embedgeo import GeometryMonitor
from tests.models import token_batch
from tests.sweep.sweeping import sweep
from tests.sweep.tiny import TEXT, model, saved_files, tokenizer_files, tokenizer_of, write_files
from tests.training.runs import WithoutDropout, fit, value

HUGE = 95  # a token whose embedding is


def test_a_line_after_the_first_measurement_and_a_text_for_tensorboard(tmp_path, caplog):
    module = WithoutDropout()
    module.model.gpt_neox.embed_in.weight.data[HUGE] *= 100
    ids = token_batch(32)["input_ids"].clamp(max=HUGE - 1)
    ids[3, 5] = HUGE
    data = DataLoader([{"input_ids": each} for each in ids], batch_size=len(ids))
    monitor = GeometryMonitor(1, pictures=False, on_error="raise")
    logger = TensorBoardLogger(tmp_path, name="run", version="")
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit(tmp_path, monitor, module=module, data=data, max_steps=2, logger=logger)
    (line,) = [each for each in caplog.messages if "at step 0, " in each]
    assert "without 1 massive row of 384" in line
    assert "skip_massive=" in line
    without = value(monitor, 0, "block.00", "V_without_massive")
    assert without < 0.5 * value(monitor, 0, "block.00", "V")


def test_a_line_after_the_first_checkpoint_of_a_sweep(tmp_path, printed):
    files = dict(tokenizer_files("gpt"))
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    ids = tokenizer_of(files)("\n".join(TEXT))["input_ids"][:128]
    counts = Counter(ids)
    huge = next(token for i, token in enumerate(ids) if counts[token] == 1 and i % 16)
    made = deepcopy(model(1))  # which other tests share
    made.gpt_neox.embed_in.weight.data[huge] *= 100
    write_files(tmp_path / "run" / "step1", saved_files(made.save_pretrained) | files)
    options = {"text": tmp_path / "text.txt", "seq_len": 16, "num_tokens": 128}
    sweep(tmp_path / "run", out=tmp_path / "out", **options)
    said = printed()
    assert "without 1 massive row of 128 " in said
    assert "--skip-massive" in said
