import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from embedgeo.checkpoints.loading import stated_positions
from embedgeo.sweep.measure import TokenLoss
from embedgeo.sweep.texts import Batch
from tests.models import VOCABULARY, NanoGPT
from tests.sweep.tiny import SIZES, model

IDS = torch.randint(5, 300, (5, 40), generator=torch.Generator().manual_seed(0))


def capped():
    config = Gemma2Config(
        vocab_size=300, head_dim=8, num_key_value_heads=2, final_logit_softcapping=0.1, **SIZES
    )
    return Gemma2ForCausalLM(config).eval()


def test_the_loss_is_the_models_own():
    for made in (model(1), model(1, "gpt2"), capped()):
        loss = TokenLoss(made, [], None)
        with torch.inference_mode():
            loss.find_head(IDS[:1, :8])
            loss.require_unseen(IDS[:1])
            for batch in IDS.split(4):  # more positions than are worked on at a time
                loss.add(loss.run(batch), Batch(batch, None, None))
        total, count = loss.total.tolist()
        want = made(IDS, labels=IDS).loss.item()
        assert (total / count, count) == (pytest.approx(want, rel=1e-6), 5 * 39)


def test_no_loss_is_recorded_of_a_model_that_sees_the_next_tokens():
    torch.manual_seed(0)
    made = XLNetLMHeadModel(XLNetConfig(vocab_size=300, d_model=16, n_layer=2, n_head=2))
    assert stated_positions(made) is None
    loss = TokenLoss(made.eval(), [], None)
    with torch.no_grad(), pytest.warns(UserWarning, match="no loss is recorded of"):
        loss.require_unseen(IDS[:1])
    assert not loss.is_wanted


class Last(NanoGPT):
    def forward(self, idx):
        return self.lm_head(self.transformer.ln_f(self.states(idx)[-1][:, [-1]])), None


class Probabilities(NanoGPT):
    def forward(self, idx):
        return super().forward(idx).softmax(-1)


@pytest.mark.parametrize("made", [Last, Probabilities])
def test_what_is_not_the_logits_of_each_token_gives_no_loss(made):
    loss, ids = TokenLoss(made(), [], None), IDS % VOCABULARY
    with torch.inference_mode():
        loss.find_head(ids[:1])
        loss.require_unseen(ids[:1])
        with pytest.warns(UserWarning, match=f"of {made.__name__}: it gives no logits"):
            loss.add(loss.run(ids), Batch(ids, None, None))
        loss.add(loss.run(ids), Batch(ids, None, None))  # without another word
    assert not loss.is_wanted


def test_the_loss_of_more_masked_positions_than_are_worked_on_at_a_time():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=300, max_position_embeddings=200, **SIZES)
    made = BertForMaskedLM(config).eval()
    ids = torch.randint(5, 300, (3, 200))
    mask = torch.arange(200) < torch.tensor([200, 3, 150])[:, None]
    masked = mask & (ids % 3 > 0)
    loss = TokenLoss(made, [], 4)
    with torch.inference_mode():
        logits = made(ids.masked_fill(masked, 4), attention_mask=mask.long()).logits
        want = F.cross_entropy(logits[masked], ids[masked])
        loss.find_head(ids[:1, :8])
        states = loss.run(ids, mask)
        loss.add(states, Batch(ids, mask, masked))
    assert (loss.total[0] / loss.total[1]).item() == pytest.approx(want.item(), rel=1e-6)
