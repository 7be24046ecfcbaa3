import io
from itertools import pairwise

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import EmbeddingMoments, GeometryMonitor
from embedgeo.report import figures
from embedgeo.report.figures import profile
from embedgeo.report.live import Pages
from embedgeo.report.pixels import heatmap
from embedgeo.results.events import AT_A_GLANCE
from embedgeo.results.glossary import TERMS
from tests.training.runs import TinyLM, fit

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()


def image_steps(folder):
    found = events(folder)
    return {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}


def records(step, value=1.0, layers=LAYERS, metrics=("mean_cosine", "M", "V")):
    return [
        {"step": step, "layer": layer, "layer_index": i, "metric": metric, "value": value}
        for i, layer in enumerate(layers)
        for metric in metrics
    ]


class Writer:
    """Takes what is written instead of a SummaryWriter."""

    def __init__(self):
        self.file_writer, self.images, self.texts = self, [], []

    def add_summary(self, summary, step):
        (value,) = summary.value
        self.images.append((value.tag, step, value.image))

    def add_text(self, tag, text, step):
        self.texts.append((tag, text, step))

    def at(self, kind):
        return [step for tag, step, _ in self.images if tag.startswith(f"geometry.{kind}/")]


def test_tensorboard_gets_images_and_a_text(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    fit(tmp_path, monitor, max_steps=6, logger=TensorBoardLogger(tmp_path, name="tb", version=""))
    steps = image_steps(tmp_path / "tb")
    assert steps.keys() == {
        *(f"geometry.{kind}/{metric}" for metric in AT_A_GLANCE for kind in ("heatmap", "profile")),
        "geometry.shares/M, V_W, V_B",
    }
    for tag, at in steps.items():
        assert at == ([0, 1, 2, 3, 4, 5] if "heatmap" in tag else [0, 1, 3, 5]), tag
    found = events(tmp_path / "tb")
    for tag in steps:
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        assert image.size == (found.Images(tag)[-1].width, found.Images(tag)[-1].height)
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    for metric in {record["metric"] for record in monitor.history}:
        assert f"| {metric} |" in written
        assert TERMS[metric].meaning in written


def test_the_images_of_a_run_are_of_that_run_only(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    for name, max_steps in (("first", 5), ("second", 2)):
        fit(tmp_path, monitor, max_steps=max_steps, logger=TensorBoardLogger(tmp_path, name=name, version=""))
    steps = image_steps(tmp_path / "second")
    assert steps["geometry.heatmap/mean_cosine"] == [0, 1]


def test_other_loggers_get_no_images(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path))
    assert len({record["step"] for record in monitor.history}) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_in_drawing_turns_monitoring_off_and_training_goes_on(tmp_path, monkeypatch, late):
    def broken(self, writers, history, *, last=False):
        if last == late:
            raise ValueError("no room to draw")

    monkeypatch.setattr(Pages, "write", broken)
    plain, _ = fit(tmp_path, max_steps=4)
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)])
    with pytest.warns(UserWarning, match="GeometryMonitor is off .* ValueError: no room to draw"):
        module, run = fit(tmp_path, monitor, max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert run.global_step == 4
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


def test_only_rank_zero_draws(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(Pages, "write", lambda self, *args, **kwargs: written.append(args))
    monkeypatch.setattr(L.Trainer, "is_global_zero", property(lambda self: False))
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    fit(tmp_path, monitor, module=TinyLM(), max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert not written


@pytest.mark.parametrize(("count", "drawn"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 3]), (20, [0, 1, 3, 7, 15, 19])])
def test_profiles_and_shares_are_drawn_at_powers_of_two_and_at_the_end(count, drawn):
    pages, writer, history = Pages(), Writer(), []
    for step in range(count):
        history += records(step, value=step + 1.0)
        pages.write([writer], history)
    pages.write([writer], history, last=True)
    assert writer.at("heatmap") == list(range(count))
    assert writer.at("profile") == writer.at("shares") == drawn
    assert len(writer.texts) == 1


def test_the_history_before_a_resume_is_drawn_too():
    pages, writer = Pages(), Writer()
    history = [*records(0), *records(10), *records(20)]
    pages.write([writer], history)
    pages.write([], [*history, *records(25)])
    pages.write([writer], [*history, *records(25), *records(30)])
    assert sorted(pages._values.index.unique("step")) == [0, 10, 20, 30]
    assert writer.at("heatmap") == [20, 30]


def test_without_measurements_nothing_is_drawn():
    pages, writer = Pages(), Writer()
    pages.write([writer], [])
    pages.write([writer], [], last=True)
    assert not writer.images
    assert not writer.texts


def test_what_is_kept_is_bounded_and_spans_all_steps():
    pages, writer = Pages(), Writer()
    steps = [*range(0, 100), *range(100, 300_000, 250)]
    history = [record for step in steps for record in records(step, layers=["block.00"], metrics=["mean_cosine"])]
    for part in (history[:50], history[:1300], history):
        pages.write([writer], part)
    kept = sorted(pages._values.index.unique("step"))
    assert len(kept) == 512
    assert kept[:5] == [0, 1, 2, 3, 4]
    assert kept[-1] == steps[-1]
    assert max(b / a for a, b in pairwise(kept) if a >= 2000) < 1.2


def cells(png, layers, columns):
    """Colours at the middle of each cell of a heatmap, shape (layers, columns, 3), the last layer first."""
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    wide, row = 720 - 142 - 146, min(44, 480 // layers)
    x = 142 + ((np.asarray(columns) + 0.5) / len(columns) * wide).astype(int)
    y = 74 + np.arange(layers) * row + row // 2
    return image[y][:, x]


def test_a_heatmap_shows_low_high_and_undefined_values_where_they_are():
    values = np.array([[0.0, 1.0], [0.0, np.nan], [1.0, 0.0]])
    png, width, height = heatmap(TERMS["mean_cosine"], [0, 100, 200], ["embed", "block.00"], values)
    assert Image.open(io.BytesIO(png)).size == (width, height)
    low, high, grey = [0, 34, 78], [254, 232, 56], [209, 209, 209]
    found = cells(png, 2, [0, 1, 2])
    np.testing.assert_allclose(found, [[high, grey, low], [low, low, high]], atol=1)


def test_a_heatmap_of_values_over_orders_of_magnitude_has_logarithmic_colours():
    values = np.array([[1.0], [10.0], [100.0]])
    middle = cells(heatmap(TERMS["Q"], [0, 1, 2], ["embed"], values)[0], 1, [0, 1, 2])[0, 1]
    linear = cells(heatmap(TERMS["mean_cosine"], [0, 1, 2], ["embed"], values)[0], 1, [0, 1, 2])[0, 1]
    np.testing.assert_allclose(middle, [124, 123, 120], atol=3)  # the middle of the map
    assert linear[0] < 40


def test_the_colours_of_a_heatmap_span_the_blocks_and_say_what_lies_beyond(monkeypatch):
    written = []
    monkeypatch.setattr("PIL.ImageDraw.ImageDraw.text", lambda self, at, words, **_: written.append(words))
    layers = ["encoder.embed", "encoder.block.00", "decoder.block.00"]
    values = np.array([[900.0, 2.0, 2.0], [900.0, 3.0, 2.5]])
    png, *_ = heatmap(TERMS["intrinsic_dimension"], [0, 1], layers, values)
    low, middle, high = [0, 34, 78], [124, 123, 120], [254, 232, 56]
    np.testing.assert_allclose(cells(png, 3, [0, 1]), [[low, middle], [low, high], [high, high]], atol=3)
    assert {"enc embed", "enc 0", "dec 0", "≥3", "2"} <= set(written)


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_heatmap_of_equal_values_can_be_drawn(value):
    png, *_ = heatmap(TERMS["mean_cosine"], [5], ["x" * 40], np.full((1, 1), value))
    assert (cells(png, 1, [0]) < 255).any()  # not white, as the page is


def test_the_figures_are_the_reports_of_what_was_measured(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "profile", lambda run, null, metric: drawn.append(run) or profile(run, null, metric))
    pages, writer = Pages(), Writer()
    history = [*records(0, 2.0), *records(10, 3.0), *records(10, np.inf, LAYERS[:1])]
    pages.write([writer], [*history, *records(20, 4.0, ["late"])], last=True)
    run = drawn[0]
    assert run.steps == [0, 10, 20]
    assert run.layers == [*LAYERS, "late"]
    nan = np.nan
    np.testing.assert_array_equal(run.table("M"), [[2, 2, 2, 2, nan], [nan, 3, 3, 3, nan], [nan, nan, nan, nan, 4]])
    assert set(run.metrics) == {"mean_cosine", "M", "V"}


def test_means_over_layers_have_a_heatmap_but_no_depth():
    pages, writer = Pages(), Writer()
    pages.write([writer], records(0, layers=["mean(last4)"]), last=True)
    assert [tag for tag, *_ in writer.images] == ["geometry.heatmap/mean_cosine"]


def test_metrics_of_the_users_own_are_explained_once_and_not_drawn():
    pages, writer, history = Pages(), Writer(), []
    for step in range(3):
        history += records(step, metrics=["mine"])
        pages.write([writer], history)
    assert not writer.images
    assert len(writer.texts) == 1
    pages.write([writer], [*history, *records(3)], last=True)
    assert writer.at("heatmap") == [3]
