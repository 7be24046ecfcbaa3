"""The recipes for TRL, sentence-transformers and PEFT: as scripts, and number for number."""

import copy
import runpy
import sys

import pandas as pd
import pytest
import torch
from datasets import Dataset
from lightning.pytorch import LightningModule
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from embedgeo import GeometryCallback, observe
from embedgeo.text import train_tokenizer
from tests import references
from tests.files import ROOT
from tests.models import llama, token_batch
from tests.training.runs import (
    assert_same_values,
    by_step,
    in_one_process,
    row_counts,
    token_moments,
)

# transformers 5.23 and trl 1.16 use old names of their own
pytestmark = pytest.mark.filterwarnings(
    "ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"
)

EXAMPLES = ROOT / "examples"
LAYERS = ["embed", "block.00", "block.01", "block.02", "block.03"]
RECIPES = {
    "trl_sft": [*LAYERS, "final_norm"],
    "sentence_transformers_finetune": LAYERS,
    "peft_lora": [*LAYERS, "final_norm"],
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def make_trainer(name, folder, *callbacks, max_steps=3):
    trainer = runpy.run_path(str(EXAMPLES / f"{name}.py"))["make_trainer"](str(folder), callbacks)
    trainer.args.max_steps, trainer.args.logging_steps, trainer.args.disable_tqdm = (
        max_steps,
        1,
        True,
    )
    trainer.remove_callback(TensorBoardCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Recorder:
    """What a Trainer's ``training_step`` is given at a step: inputs, weights and torch's random
    state.
    """

    def __init__(self, trainer, step):
        training_step = trainer.training_step

        def recorded(model, inputs, *args, **kwargs):
            if trainer.state.global_step == step:
                self.inputs, self.random_state = dict(inputs), torch.get_rng_state()
                self.weights = copy.deepcopy(model.state_dict())
            return training_step(model, inputs, *args, **kwargs)

        trainer.training_step, self._trainer = recorded, trainer

    def observed(self, run, **options):
        """What `observe` measures while ``run(model, inputs)`` runs, with everything as it was at
        the step.
        """
        model = self._trainer.model
        model.load_state_dict(self.weights)
        model.train()
        torch.set_rng_state(self.random_state)
        with torch.no_grad(), observe(model, metrics=token_moments, **options) as geometry:
            run(model, self.inputs)
        return geometry.compute()


@every_recipe
@pytest.mark.usefixtures("unpainted")
def test_the_script_runs_and_says_what_to_open(tmp_path, monkeypatch, printed, name):
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert printed().endswith(f"tensorboard --logdir {tmp_path}\nembedgeo report {tmp_path}\n")
    history = pd.read_parquet(tmp_path / "history.parquet")
    assert list(history["layer"].unique()) == [*RECIPES[name], "mean"]
    assert list(history["step"].unique()) == [0, 5, 10]
    assert "V_W_unbiased" in set(history["metric"])
    assert list(tmp_path.rglob("events*"))


def test_packed_texts_are_told_apart_as_attention_does(tmp_path):
    callback = GeometryCallback(2, metrics=token_moments, on_error="raise")
    of_loss = GeometryCallback(
        2, metrics=token_moments, mask=lambda batch: batch["labels"] != -100, prefix="of_loss"
    )
    trainer = make_trainer("trl_sft", tmp_path, callback, of_loss)
    trainer.model.double().set_attn_implementation("eager")
    step = 2
    recorder = Recorder(trainer, step)
    trainer.train()
    given = {name: recorder.inputs[name] for name in ("input_ids", "position_ids")}
    measured = by_step(callback.history)[step]
    assert_same_values(measured, recorder.observed(lambda model, inputs: model(**given)))

    token_ids = given["input_ids"][0]
    starts = given["position_ids"][0] == 0
    numbers = starts.cumsum(0)
    texts = token_ids.split(numbers.unique(return_counts=True)[1].tolist())
    assert len(texts) > 2
    assert measured["embed"]["n"] == len(token_ids)
    assert by_step(of_loss.history)[step]["embed"]["n"] == len(token_ids) - len(texts)
    with torch.no_grad():
        packed = trainer.model(**given, output_hidden_states=True).hidden_states
        alone = [
            trainer.model(text[None], output_hidden_states=True).hidden_states for text in texts
        ]
    for layer, i in (("embed", 0), ("block.01", 2), ("final_norm", 4)):
        got = measured[layer]["V_W_unbiased"]
        unpacked = torch.cat([states[i][0] for states in alone]).detach()
        of_packed = references.within_by_pairs(packed[i][0].detach(), token_ids, numbers)
        of_unpacked = references.within_by_pairs(unpacked, token_ids, numbers)
        assert got == pytest.approx(of_packed, rel=1e-9, abs=1e-15)
        # Llama's norm and rotation are in float32
        assert got == pytest.approx(of_unpacked, rel=1e-6, abs=1e-12)


def test_all_sentences_of_a_step_count_also_at_the_last_weights(tmp_path):
    by_hand = lambda model, texts: [model(features) for features in texts]  # noqa: E731
    callbacks = [
        GeometryCallback(
            2,
            metrics=token_moments,
            rows=rows,
            prefix=rows,
            on_error="raise",
            probe_forward=lambda model, batch: by_hand(model, trainer.collect_features(batch)[0]),
        )
        for rows in ("tokens", "mean")
    ]
    trainer = make_trainer("sentence_transformers_finetune", tmp_path, *callbacks)
    recorder = Recorder(trainer, 2)
    trainer.train()
    pairs = trainer.collect_features(recorder.inputs)[0]
    counts = (
        sum(int(features["attention_mask"].sum()) for features in pairs),
        sum(len(features["attention_mask"]) for features in pairs),
    )
    for callback, rows, count in zip(callbacks, ("tokens", "mean"), counts, strict=True):
        history = by_step(callback.history)
        assert_same_values(
            history[2], recorder.observed(lambda model, _: by_hand(model, pairs), rows=rows)
        )
        assert history[3]["block.03"]["n"] == count
    embeddings = torch.cat([features["sentence_embedding"] for features in pairs]).double()
    expected = float(embeddings.square().sum(1).mean())
    assert history[2]["block.03"]["Q"] == pytest.approx(expected, rel=1e-5)


ADAPTERS = {
    "embeddings": LoraConfig(target_modules=["q_proj", "embed_tokens"]),
    "modules to save": LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"]
    ),
    "tokens": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": PromptTuningConfig(num_virtual_tokens=3),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_layers_of_every_adapter_are_those_of_the_model(adapter):
    config, batch = ADAPTERS[adapter], token_batch(padding="left")
    config.task_type = "CAUSAL_LM"
    adapted = get_peft_model(llama(), config).eval()
    values = in_one_process(adapted, [batch], metrics=token_moments)
    assert list(values) == ["embed", "block.00", "block.01", "block.02", "final_norm"]
    kept = batch["input_ids"][batch["attention_mask"].bool()]
    assert {at["n"] for at in values.values()} == {len(kept)}
    assert {at["token_types"] for at in values.values()} == {len(kept.unique())}


def of_preferences(kind, folder, **given):
    """A trainer of TRL's on a prompt or two; ``given`` makes its configuration and itself."""
    tokenizer = train_tokenizer("a prompt, chosen well or rejected as the worst", 300)
    tokenizer.pad_token = tokenizer.eos_token
    arguments = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments |= {"per_device_train_batch_size": 2, "max_steps": 2, "bf16": False, "use_cpu": True}
    trainer, config = kind
    models = [make(llama(vocab_size=len(tokenizer))) for make in given.pop("models")]
    arguments |= given.pop("arguments", {})
    return trainer(
        *models, args=config(str(folder), **arguments), processing_class=tokenizer, **given
    )


PAIRS = {
    "prompt": ["a prompt, "] * 4,
    "chosen": ["chosen well"] * 4,
    "rejected": ["rejected as the worst"] * 4,
}


class Wrapped(LightningModule):
    """A module of Lightning's around a model, which has what it has not itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def plain(model):
    return model


@pytest.mark.parametrize(
    ("models", "peft_config"),
    [
        ([plain] * 2, None),
        ([Wrapped] * 2, None),
        ([plain], LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])),
    ],
)
# the reference's own
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
# trl's use of it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_dpo_counts_the_pairs_once_and_not_the_reference(tmp_path, models, peft_config):
    callback = GeometryCallback(1, metrics=token_moments, on_error="raise")
    given = {"models": models, "peft_config": peft_config, "callbacks": [callback]}
    given["train_dataset"] = Dataset.from_dict(PAIRS)
    trainer = of_preferences((DPOTrainer, DPOConfig), tmp_path, **given)
    recorder = Recorder(trainer, 1)
    trainer.train()
    num_tokens = int(recorder.inputs["attention_mask"].sum())
    for step in (0, 1, 2):
        assert by_step(callback.history)[step]["block.01"]["n"] == num_tokens
    inputs = {name: recorder.inputs[name] for name in ("input_ids", "attention_mask")}
    assert_same_values(
        by_step(callback.history)[1], recorder.observed(lambda model, _: model(**inputs))
    )


def test_grpo_counts_the_pass_of_the_loss_and_not_the_generation(tmp_path):
    callback = GeometryCallback(1, metrics=token_moments)
    trainer = of_preferences(
        (GRPOTrainer, GRPOConfig),
        tmp_path,
        models=[plain],
        arguments={"num_generations": 2, "max_completion_length": 6, "logging_steps": 1},
        reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": ["a prompt", "and another one"]}),
        callbacks=[callback],
    )
    with pytest.warns(
        UserWarning, match=r"the weights of the last step, 2, are not measured, because"
    ):
        trainer.train()
    num_tokens = [row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row]
    measured = [by_step(callback.history)[step]["block.01"]["n"] for step in (0, 1)]
    assert measured == [num_tokens[0], num_tokens[1] - num_tokens[0]]


def test_losses_whose_layers_are_reached_without_gradients_are_told(tmp_path):
    callback = GeometryCallback(2, metrics=token_moments, measure_last=False, on_error="raise")
    trainer = make_trainer("sentence_transformers_finetune", tmp_path, callback, max_steps=1)
    trainer.loss = CachedMultipleNegativesRankingLoss(trainer.model, mini_batch_size=5)
    said = "only forward passes without gradients reached "
    with pytest.warns(UserWarning, match=said):
        trainer.train()
    assert not any(row_counts(callback))
