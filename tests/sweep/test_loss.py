import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM

from embedgeo.checkpoints.loading import LoadedModel
from embedgeo.sweep.loss import TokenLoss
from tests.sweep.tiny import SIZES, model

IDS = torch.randint(5, 300, (3, 40), generator=torch.Generator().manual_seed(0))


def capped():
    config = Gemma2Config(vocab_size=300, head_dim=8, num_key_value_heads=2, final_logit_softcapping=0.1, **SIZES)
    return Gemma2ForCausalLM(config).eval()


class Widths:
    """How many positions the head works on at a time."""

    def __init__(self, head):
        self.seen = []
        head.register_forward_hook(lambda module, args, output: self.seen.append(output.shape[:-1].numel()))


@pytest.mark.parametrize(
    ("make", "is_found"), [(lambda: model(1), True), (lambda: model(1, "gpt2"), True), (capped, False)]
)
def test_the_loss_is_the_models_own_and_whole_logits_are_made_only_where_they_must_be(make, is_found):
    made = make()
    want = made(IDS, labels=IDS).loss.item()
    loss = TokenLoss(LoadedModel(made), [], None)
    widths = Widths(made.get_output_embeddings())
    with torch.inference_mode():
        loss.find_head(IDS[:1, :8])
        widths.seen.clear()
        for batch in IDS.split(2):
            loss.add(loss.run(batch), batch, None)
    total, count = loss.total.tolist()
    assert (total / count, count) == (pytest.approx(want, rel=1e-6), 3 * 39)
    assert (max(widths.seen) < IDS.shape[1]) == is_found


def test_an_encoders_loss_is_about_the_masked_tokens():
    made, mask = model(1, "bert"), 4
    masked = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    want = F.cross_entropy(made(IDS.masked_fill(masked, mask)).logits[masked], IDS[masked]).item()
    loss = TokenLoss(LoadedModel(made, is_encoder=True), [], mask)
    with torch.inference_mode():
        loss.find_head(IDS[:1, :8])
        loss.add(loss.run(IDS), IDS, masked)
    assert loss.total[0].item() / loss.total[1].item() == pytest.approx(want, rel=1e-6)


def test_a_head_that_is_measured_sees_every_position():
    made = model(1)
    loss = TokenLoss(LoadedModel(made), [made.get_output_embeddings()], None)
    widths = Widths(made.get_output_embeddings())
    with torch.inference_mode():
        loss.find_head(IDS[:1, :8])
        loss.run(IDS)
    assert widths.seen == [IDS.numel()]
