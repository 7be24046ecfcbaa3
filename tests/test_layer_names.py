from embedgeo.layer_names import (
    blocks_by_side,
    is_along,
    is_input,
    layer_labels,
    layer_ticks,
    relative_depths,
    side,
)


def test_layers_say_their_side_and_place():
    assert [
        side(layer) for layer in ("decoder.block.03", "block.03", "encoder.layer.03.attention")
    ] == [
        "decoder.",
        "",
        "",
    ]
    assert [is_along(layer) for layer in ("block.03", "mean(last4)", "encoder.mean(last4)")] == [
        True,
        False,
        False,
    ]
    assert [is_input(layer) for layer in ("encoder.embed", "hidden.00", "hidden.01")] == [
        True,
        True,
        False,
    ]


def test_blocks_by_side_are_blocks_or_else_numbered_hidden_states():
    layers = ["encoder.embed", "encoder.block.00", "decoder.block.00", "decoder.final_norm"]
    assert blocks_by_side(layers) == {
        "encoder.": ["encoder.block.00"],
        "decoder.": ["decoder.block.00"],
    }
    assert blocks_by_side(["hidden.00", "hidden.01", "hidden.02"]) == {
        "": ["hidden.01", "hidden.02"]
    }


def test_relative_depths_go_from_the_input_to_the_last_block():
    blocks = relative_depths(["embed", "block.00", "block.01", "final_norm"])
    assert blocks == {"": {"embed": 0.0, "block.00": 0.5, "block.01": 1.0}}
    hidden = relative_depths(["hidden.00", "hidden.01", "hidden.02"])
    assert hidden == {"": {"hidden.00": 0.0, "hidden.01": 0.5, "hidden.02": 1.0}}
    assert relative_depths(["a", "b", "c"]) == {"": {"a": 0.0, "b": 0.5, "c": 1.0}}


def test_labels_are_short_and_distinct():
    blocks = ["embed", "block.00", "block.07", "final_norm", "decoder.block.11"]
    assert layer_labels(blocks) == (["embed", "0", "7", "norm", "dec 11"], "")
    assert layer_labels(["hidden.00", "hidden.12", "encoder.hidden.03"]) == (
        ["h0", "h12", "enc h3"],
        "",
    )
    modules = ["gpt_neox.layers.0.attention.dense", "gpt_neox.layers.1.attention.dense"]
    assert layer_labels(modules) == (["0", "1"], "gpt_neox.layers.*.attention.dense")
    mixed = ["layers.0.attention.dense", "layers.1.attention.dense", "block.01"]
    assert layer_labels(mixed) == (["0.attentio…", "1.attentio…", "1"], "")


def test_ticks_are_the_ends_and_round_numbers():
    layers = ["embed", *(f"block.{i:02d}" for i in range(32)), "final_norm"]
    labels, _ = layer_labels(layers)
    assert [labels[i] for i in layer_ticks(layers, 9)] == [
        "embed",
        "5",
        "10",
        "15",
        "20",
        "25",
        "norm",
    ]
