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
    assert [*map(side, ("decoder.block.03", "encoder.layer.03.attention"))] == ["decoder.", ""]
    assert [*map(is_along, ("block.03", "encoder.mean(last4)"))] == [True, False]
    assert [*map(is_input, ("encoder.embed", "hidden.00", "hidden.01"))] == [True, True, False]


def test_blocks_by_side_are_blocks_or_else_numbered_hidden_states():
    layers = ["encoder.embed", "encoder.block.00", "decoder.block.00", "decoder.final_norm"]
    assert blocks_by_side(layers) == {"encoder.": layers[1:2], "decoder.": layers[2:3]}
    hidden = ["hidden.00", "hidden.01", "hidden.02"]
    assert blocks_by_side(hidden) == {"": hidden[1:]}


def test_relative_depths_go_from_the_input_to_the_last_block():
    depths = {"embed": 0.0, "block.00": 0.5, "block.01": 1.0}
    assert relative_depths([*depths, "final_norm"]) == {"": depths}
    for layers in (["hidden.00", "hidden.01", "hidden.02"], ["a", "b", "c"]):
        assert relative_depths(layers) == {"": dict(zip(layers, (0.0, 0.5, 1.0), strict=True))}


def test_labels_are_short_and_distinct():
    for labels, layers in (
        ("embed/7/norm/dec 11", ["embed", "block.07", "final_norm", "decoder.block.11"]),
        ("h0/h12/enc h3", ["hidden.00", "hidden.12", "encoder.hidden.03"]),
        ("0.mlp.dense/1.mlp.dense", [f"gpt.layers.{i}.mlp.dense" for i in (0, 1)]),
        (
            "0.attentio…/1.attentio…/1",
            [f"layers.{i}.attention.dense" for i in (0, 1)] + ["block.01"],
        ),
    ):
        assert layer_labels(layers) == labels.split("/")


def test_ticks_are_the_ends_and_round_numbers():
    layers = ["embed", *(f"block.{i:02d}" for i in range(32)), "final_norm"]
    labels = layer_labels(layers)
    named = [labels[i] for i in layer_ticks(layers, 9)]
    assert named == ["embed", "5", "10", "15", "20", "25", "norm"]
