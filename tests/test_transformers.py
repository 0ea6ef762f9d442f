"""PrivateTrainer: sums of Trainer's own losses, one by one; what it refuses; callbacks, saving, resuming."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

import clipwise as cw
from clipwise.errors import ParameterMismatch, PrivateData, UnsupportedOp
from clipwise.integrations.losses import class_losses, token_losses
from clipwise.integrations.transformers import REFUSED, PrivateTrainer, plan_for

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


class Collator:
    """Pads to a fixed length, as a private run should."""

    def __init__(self, length: int = 9, pad: int = 0) -> None:
        self.length, self.pad = length, pad

    def __call__(self, records):
        out = {}
        for name in records[0]:
            values = [torch.as_tensor(r[name]) for r in records]
            if values[0].dim() == 1 and name != "pixel_values":
                fill = {"labels": -100, "attention_mask": 0}.get(name, self.pad)
                values = [torch.nn.functional.pad(v, (0, self.length - len(v)), value=fill) for v in values]
            out["labels" if name == "label" else name] = torch.stack(values)
        return out


def text(kind: str, n: int = 7):
    """Records of unequal length, as a tokenizer gives them."""
    g = torch.Generator().manual_seed(0)
    records = []
    for i in range(n):
        length = int(torch.randint(3, 10, (), generator=g))
        ids = torch.randint(2, 40, (length,), generator=g).tolist()
        record = {"input_ids": ids, "attention_mask": [1] * length}
        if kind == "class":
            record["label"] = i % 3
        else:
            labels = torch.randint(0, 3 if kind == "tokens" else 40, (length,), generator=g).tolist()
            record["labels"] = ids if kind == "next token" else [-100, *labels[1:]]
        records.append(record)
    return records


def pictures(n: int = 6):
    g = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=g), "label": i % 3} for i in range(n)]


def model_of(name: str):
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(**SMALL, num_labels=3, max_position_embeddings=16)
        return transformers.BertForSequenceClassification(config), text("class")
    if name == "roberta":
        config = transformers.RobertaConfig(**SMALL, num_labels=3, max_position_embeddings=16, pad_token_id=0)
        return transformers.RobertaForTokenClassification(config), text("tokens")
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
        return transformers.GPT2LMHeadModel(config), text("next token")
    if name == "t5":
        config = transformers.T5Config(
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            vocab_size=40,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config), text("seq2seq")
    config = transformers.ViTConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config), pictures()


def arguments(folder, **others):
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True}
    given |= {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "learning_rate": 0.1}
    return TrainingArguments(output_dir=str(folder), **{**given, **others})


def plan(steps: int = 3, q: float = 1.0, **others):
    return cw.Plan(
        noise_multiplier=1.0, delta=1e-5, sampling_prob=q, steps=steps, expected_batch_size=8, **others
    )  # fmt: skip


def trainer_of(folder, name="bert", arguments_=None, plan_=None, **others):
    model, records = model_of(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    others.setdefault("data_collator", Collator())
    return PrivateTrainer(
        model, arguments(folder, **(arguments_ or {})), plan=plan_ or plan(), train_dataset=records, **others
    )


class Summed:
    """Remembers the clipped sum of the first step, before it is noised."""

    def __init__(self, monkeypatch):
        add = cw.noise.NoiseSource.add_

        def seen(source, values, *, stream, sequence, **options):
            if stream == "gradient" and sequence == 1:
                self.sums = {n: v.clone() for n, v in values.items()}
            return add(source, values, stream=stream, sequence=sequence, **options)

        monkeypatch.setattr(cw.noise.NoiseSource, "add_", seen)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "t5", "vit"])
def test_the_sum_is_that_of_trainers_own_losses_one_by_one(tmp_path, monkeypatch, name):
    """All records (q = 1) in two microbatches, against float64, single examples and the model's own loss."""
    seen = Summed(monkeypatch)
    trainer = trainer_of(tmp_path, name)
    alone = copy.deepcopy(trainer.model).double().train()
    trainer.train()
    collate = trainer.data_collator
    expected: dict[str, torch.Tensor] = {}
    for record in trainer.train_dataset:
        batch = {k: v.double() if v.is_floating_point() else v for k, v in collate([record]).items()}
        alone.zero_grad()
        alone(**batch).loss.backward()
        grads = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        weight = 1.0 / (norm + 0.1 / (norm + 0.1))  # PSAC, C = 1
        for n, g in grads.items():
            expected[n] = expected.get(n, 0) + weight * g
    scale = max(float(g.abs().max()) for g in expected.values())
    for n, g in expected.items():
        torch.testing.assert_close(seen.sums[n].double(), g, rtol=1e-4, atol=1e-6 * scale * 10)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "t5", "vit"])
def test_the_sum_is_that_of_clipped_sum(tmp_path, monkeypatch, name):
    seen = Summed(monkeypatch)
    trainer = trainer_of(tmp_path, name)
    before = copy.deepcopy(trainer.model).train()
    trainer.train()
    batch = trainer.data_collator(list(trainer.train_dataset))
    expected = cw.clipped_sum(before, trainer._losses, batch, cw.PSAC()).grads
    scale = max(float(g.abs().max()) for g in expected.values())
    assert max(float((seen.sums[n] - g).abs().max()) for n, g in expected.items()) <= 1e-6 * scale


def test_a_run_logs_saves_resumes_and_counts(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            seen.append(logs)

        def on_step_end(self, args, state, control, **others):
            if state.global_step == 4 and not done:
                control.should_training_stop = True

    done: list[int] = []
    options = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    first = trainer_of(tmp_path, arguments_=options, plan_=plan(8, 0.5), callbacks=[Watch()])
    out = first.train()
    assert out.global_step == 4
    assert all("loss" not in logs for logs in seen)
    assert seen[0]["epsilon"] < seen[1]["epsilon"] < seen[3]["epsilon"] == out.metrics["epsilon"]
    assert first._get_learning_rate() == pytest.approx(0.05)
    weights = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    first.training.ledger.close()
    again = trainer_of(tmp_path, arguments_=options, plan_=plan(8, 0.5))
    with pytest.raises(ParameterMismatch, match="resume_from_checkpoint=True"):
        again.train()
    done.append(1)
    second = trainer_of(tmp_path, arguments_=options, plan_=plan(8, 0.5))
    begun = second._begun(second._checkpoint(True))
    assert begun.ledger.charges == 4
    assert all(torch.equal(p, weights[n]) for n, p in second.model.named_parameters())
    begun.ledger.close()
    second.training = None
    third = trainer_of(tmp_path, arguments_=options, plan_=plan(8, 0.5))
    assert third.train(resume_from_checkpoint=True).global_step == 8
    assert third._get_learning_rate() == pytest.approx(0.0)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kinds.count("charge") == 8
    third.save_model(str(tmp_path / "kept"))
    assert transformers.BertForSequenceClassification.from_pretrained(tmp_path / "kept") is not None
    third.training.ledger.close()


def test_evaluation_is_for_public_records_or_paid_for(tmp_path):
    with pytest.raises(PrivateData, match="eval_is_public"):
        trainer_of(tmp_path, arguments_={"eval_strategy": "epoch"}, eval_dataset=text("class"))
    trainer = trainer_of(tmp_path, plan_=plan(evaluations=1), eval_dataset=text("class"))
    with pytest.raises(PrivateData, match="private_accuracy"):
        trainer.evaluate()
    with pytest.raises(PrivateData, match="predict"):
        trainer.predict(text("class"))
    trainer.train()
    assert -40 < trainer.private_accuracy(text("class"), size=7) < 40
    with pytest.raises(cw.errors.BudgetExhausted):
        trainer.private_accuracy(text("class"), size=7)
    trainer.training.ledger.close()
    public = trainer_of(
        tmp_path / "public",
        arguments_={"eval_strategy": "steps", "eval_steps": 1},
        eval_dataset=text("class"),
        eval_is_public=True,
    )
    public.train()
    assert sum("eval_loss" in logs for logs in public.state.log_history) == 3
    assert public.model.training
    public.training.ledger.close()


WRONG = {
    "auto_find_batch_size": True, "fp16": True, "neftune_noise_alpha": 5.0, "use_liger_kernel": True,
    "include_num_input_tokens_seen": "all", "skip_memory_metrics": False, "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length", "data_seed": 3, "max_grad_norm": 0.3, "optim": "adalomo",
    "debug": "underflow_overflow", "deepspeed": {"a": 1}, "fsdp": "full_shard", "parallelism_config": object(),
    "world_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_would_break_the_guarantee_are_refused_by_name(tmp_path, name):
    args = arguments(tmp_path)
    args = copy.copy(args)
    kind = type("Changed", (type(args),), {name: WRONG[name]})
    object.__setattr__(args, "__class__", kind)
    args.__dict__.pop(name, None)
    with pytest.raises(UnsupportedOp, match=f"TrainingArguments\\({name}="):
        PrivateTrainer(model_of("bert")[0], args, plan=plan(), train_dataset=text("class"))


def test_numbers_that_contradict_the_plan_are_refused(tmp_path):
    with pytest.raises(ParameterMismatch, match="expects batches of 8"):
        trainer_of(tmp_path, arguments_={"per_device_train_batch_size": 5})
    with pytest.raises(ParameterMismatch, match="max_steps=7"):
        trainer_of(tmp_path, arguments_={"max_steps": 7})
    with pytest.raises(UnsupportedOp, match="compute_loss_func"):
        trainer_of(tmp_path, compute_loss_func=lambda *a, **k: 0)
    trainer = trainer_of(tmp_path)
    with pytest.raises(UnsupportedOp, match="tune"):
        trainer.hyperparameter_search()
    with pytest.raises(UnsupportedOp, match="trial"):
        trainer.train(trial={"a": 1})
    made = plan_for(arguments(tmp_path, num_train_epochs=2), size=80, noise_multiplier=1.0, delta=1e-5)
    assert (made.steps, made.expected_batch_size, made.sampling_prob) == (20, 8, 0.1)


def test_padding_to_the_longest_with_a_pooled_mean_is_seen(tmp_path):
    """A collate function that lets records see each other's length is caught by probes of unequal lengths."""

    class Longest(Collator):
        def __call__(self, records):
            self.length = max(len(r["input_ids"]) for r in records)
            return {k: v for k, v in super().__call__(records).items() if k != "attention_mask"}

    trainer = trainer_of(tmp_path, data_collator=Longest())
    with pytest.raises(cw.errors.CrossExampleOp):
        trainer.train()


def test_records_of_tensors(tmp_path):
    """Labels as tensors without axes, token numbers as tensors of one length."""
    records = [
        {
            "input_ids": torch.tensor((r["input_ids"] * 9)[:9]),
            "attention_mask": torch.ones(9, dtype=torch.int64),
            "label": torch.tensor(r["label"]),
        }
        for r in text("class")
    ]
    trainer = PrivateTrainer(
        model_of("bert")[0], arguments(tmp_path), plan=plan(), train_dataset=records, data_collator=Collator()
    )
    assert trainer.train().global_step == 3
    trainer.training.ledger.close()


def test_records_that_see_each_other_by_their_length_are_refused(tmp_path):
    """Tensors of unequal length, labels longer than the text: every sequence of the made-up records varies."""

    def longest(records):
        out = {}
        for name in records[0]:
            values = [torch.as_tensor(r[name]) for r in records]
            width = max(len(v) for v in values) if values[0].dim() else 0
            if width:
                values = [torch.nn.functional.pad(v, (0, width - len(v))) for v in values]
            out[name] = torch.stack(values)
        return out

    def pooled(model, batch):
        hidden = model.bert(input_ids=batch["input_ids"]).last_hidden_state.mean(1)
        return torch.nn.functional.cross_entropy(model.classifier(hidden), batch["label"], reduction="none")

    def by_width(model, batch):
        scores = model(input_ids=batch["input_ids"]).logits
        return scores.square().sum(1) * batch["tags"].float().mean(1)

    tensors = [{"input_ids": torch.randint(2, 40, (5 + i,)), "label": torch.tensor(i % 3)} for i in range(4)]
    tagged = [{"input_ids": torch.randint(2, 40, (6,)), "tags": torch.ones(4 + i).long()} for i in range(4)]
    for records, losses in ((tensors, pooled), (tagged, by_width)):
        trainer = PrivateTrainer(
            model_of("bert")[0],
            arguments(tmp_path / losses.__name__, remove_unused_columns=False),
            plan=plan(),
            train_dataset=records,
            data_collator=longest,
            losses=losses,
        )
        with pytest.raises(cw.errors.CrossExampleOp):
            trainer.train()


@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "BartForCausalLM"])
def test_the_loss_is_the_models_own_or_it_is_refused(tmp_path, monkeypatch, kind):
    config = transformers.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
        decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    records = text("next token" if kind == "BartForCausalLM" else "seq2seq")
    trainer = PrivateTrainer(
        model, arguments(tmp_path), plan=plan(), train_dataset=records, data_collator=Collator(pad=1)
    )
    if kind == "BartForCausalLM":  # it does not shift its labels, whatever its name says
        with pytest.raises(UnsupportedOp, match="losses="):
            trainer.train()
        return
    one = Collator(pad=1)(records[:1])
    model.eval()
    assert float(trainer._losses(model, one)) == pytest.approx(float(model(**one).loss), rel=1e-5)


def test_the_training_records_are_never_public(tmp_path):
    records = text("class")
    with pytest.raises(PrivateData, match="train_dataset"):
        PrivateTrainer(
            model_of("bert")[0], arguments(tmp_path), plan=plan(), train_dataset=records, eval_dataset=records,
            eval_is_public=True,
        )  # fmt: skip
    trainer = trainer_of(tmp_path, eval_is_public=True)
    with pytest.raises(PrivateData):
        trainer.evaluate(trainer.train_dataset)


def test_more_that_is_refused_or_said(tmp_path):
    class Own(PrivateTrainer):
        def compute_loss(self, *given, **named):
            return 0

    with pytest.raises(UnsupportedOp, match="compute_loss"):
        Own(model_of("bert")[0], arguments(tmp_path), plan=plan(), train_dataset=text("class"))
    with pytest.raises(ParameterMismatch, match="length"):
        PrivateTrainer(model_of("bert")[0], arguments(tmp_path / "s"), plan=plan(), train_dataset=iter([]))
    assert plan_for(arguments(tmp_path, max_steps=7), size=80, noise_multiplier=1.0, delta=1e-5).steps == 7
    (tmp_path / "clipwise.safetensors").write_bytes(b"")
    model = model_of("bert")[0]
    model.config._name_or_path = str(tmp_path)
    with pytest.warns(UserWarning, match="private run"):
        PrivateTrainer(model, arguments(tmp_path / "n"), plan=plan(), train_dataset=text("class"))


def test_columns_of_text_do_not_matter(tmp_path):
    records = [{**r, "sentence": "a b"} for r in text("class")]

    class Drops(Collator):
        def __call__(self, given):
            return super().__call__([{k: v for k, v in r.items() if k != "sentence"} for r in given])

    trainer = PrivateTrainer(
        model_of("bert")[0], arguments(tmp_path), plan=plan(), train_dataset=records, data_collator=Drops()
    )
    assert trainer.train().global_step == 3
    trainer.training.ledger.close()


def test_lora_bf16_and_checkpointing(tmp_path):
    import peft

    model, records = model_of("bert")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    )
    frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    trainer = PrivateTrainer(
        adapted,
        arguments(tmp_path, bf16=True, gradient_checkpointing=True),
        plan=plan(),
        train_dataset=records,
        data_collator=Collator(),
    )
    trainer.train()
    assert all(torch.equal(p, frozen[n]) for n, p in adapted.named_parameters() if not p.requires_grad)
    assert any("lora_B" in n and p.abs().sum() > 0 for n, p in adapted.named_parameters())
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    trainer.training.ledger.close()


def test_losses_per_example_agree_with_transformers_on_single_ones():
    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 5, 7, generator=g), torch.randint(0, 7, (3, 5), generator=g)
    labels[0, 1:3] = labels[2, :] = -100
    for smoothing in (0.0, 0.1):
        found = token_losses(logits, labels, "mean", smoothing)
        smoother = transformers.trainer_pt_utils.LabelSmoother(smoothing)
        for i in range(2):
            one = smoother({"logits": logits[i : i + 1]}, labels[i : i + 1])
            torch.testing.assert_close(found[i], one)
        assert float(found[2]) == 0  # nothing of it is labelled
    assert torch.allclose(token_losses(logits, labels, "sum", 0.0)[1], 5 * token_losses(logits, labels, "mean", 0.0)[1])
    scores, many = torch.randn(3, 4, generator=g), torch.randint(0, 2, (3, 4), generator=g).float()
    for problem, y, loss in (
        ("regression", many, torch.nn.MSELoss()),
        ("multi_label_classification", many, torch.nn.BCEWithLogitsLoss()),
        ("single_label_classification", torch.tensor([0, 3, 1]), torch.nn.CrossEntropyLoss()),
    ):
        for i in range(3):
            torch.testing.assert_close(class_losses(scores, y, problem, 0.0)[i], loss(scores[i : i + 1], y[i : i + 1]))


def test_unknown_heads_ask_for_losses(tmp_path):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UnsupportedOp, match="losses="):
        PrivateTrainer(model, arguments(tmp_path), plan=plan(), train_dataset=[])
