"""Hugging Face's Trainer on chunks gives the numbers of an ordinary one, in less than the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.errors import ConfigError

from .hugging_face import Texts, llama, saved, small

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")
pytest.importorskip("accelerate", reason="needs the extra [hf]")

from patrickstar.integrations.transformers import Seq2SeqTrainer, Trainer  # noqa: E402

STEPS = 4
BUDGET = 300 << 10  # bytes; the state has 16 for each of 33,000 weights


def arguments(folder: Path, **over: Any) -> Any:
    given = {
        "report_to": [],
        "logging_steps": 1,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **given | over)


def budgets(folder: Path) -> dict[str, Any]:
    return {"memory": {"host": BUDGET, "disk": {"path": str(folder / "spool")}}}


def told(trainer: Any) -> list[dict[str, float]]:
    """What the Trainer logged that is no time."""
    kept = {"loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch"}
    return [
        {k: v for k, v in entry.items() if k in kept}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]


def assert_same_run(ours: Any, ordinary: Any) -> None:
    assert told(ours) == told(ordinary)
    expected = ordinary.model.state_dict()
    for name, weight in ours.engine.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def both(
    make: Callable[[], Any], folder: Path, *, data: Any = None, **over: Any
) -> tuple[Any, Any]:
    """An ordinary Trainer and one on chunks, both trained."""
    data = data or Texts()
    ordinary = transformers.Trainer(
        model_init=make, args=arguments(folder / "a", **over), train_dataset=data, eval_dataset=data
    )
    ordinary.train()
    ours = Trainer(
        model_init=make,
        args=arguments(folder / "b", **over),
        train_dataset=data,
        eval_dataset=data,
        patrickstar=budgets(folder),
    )
    ours.train()
    return ours, ordinary


def test_losses_norms_and_weights_are_those_of_an_ordinary_trainer(tmp_path: Path) -> None:
    path = saved(tmp_path / "model")
    ours, ordinary = both(lambda: transformers.AutoModelForCausalLM.from_pretrained(path), tmp_path)
    assert_same_run(ours, ordinary)
    losses = [entry["loss"] for entry in told(ours)]
    assert len(losses) == STEPS and losses[-1] < losses[0]
    host = ours.engine.memory_report().tiers["host"]
    state = 16 * sum(p.numel() for p in ours.model.parameters())
    assert host.peak <= BUDGET < 0.6 * state
    ours.engine.close()


def test_a_ready_model_and_a_ready_optimizer_are_taken_over(tmp_path: Path) -> None:
    def run(kind: Any, **more: Any) -> Any:
        model = llama()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        trainer = kind(
            model,
            arguments(tmp_path),
            train_dataset=Texts(),
            optimizers=(optimizer, schedule),
            **more,
        )
        trainer.train()
        return trainer

    ours, ordinary = run(Trainer, patrickstar=budgets(tmp_path)), run(transformers.Trainer)
    assert_same_run(ours, ordinary)
    ours.engine.close()


def test_pretrained_weights_larger_than_the_budget_go_straight_into_chunks(tmp_path: Path) -> None:
    big = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    llama(**big).save_pretrained(tmp_path / "model")
    ours = Trainer(
        model_init=lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        args=arguments(tmp_path),
        patrickstar=budgets(tmp_path),
    )
    assert sum(p.nbytes for p in ours.model.parameters()) > 3 * BUDGET
    assert ours.engine.memory_report().tiers["host"].peak <= BUDGET
    for name, weight in llama(**big).state_dict().items():
        assert torch.equal(ours.engine.state_dict()[name], weight), name
    ours.engine.close()


def test_a_run_resumes_from_a_trainers_checkpoint(tmp_path: Path) -> None:
    ours, ordinary = both(small, tmp_path, save_strategy="steps", save_steps=2)
    ours.engine.close()
    again = Trainer(
        model_init=small,
        args=arguments(tmp_path / "b", save_strategy="steps", save_steps=2),
        train_dataset=Texts(),
        patrickstar=budgets(tmp_path),
    )
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_same_run(again, ordinary)
    again.engine.close()


def test_transformers_loads_a_checkpoint_and_what_save_model_wrote(tmp_path: Path) -> None:
    ours = Trainer(
        llama(),
        arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
        train_dataset=Texts(),
        patrickstar=budgets(tmp_path),
    )
    ours.train()
    ours.save_model(str(tmp_path / "final"))
    expected = {n: w.clone() for n, w in ours.engine.state_dict().items()}
    ours.engine.close()
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        assert (folder / "generation_config.json").is_file()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_evaluation_and_generation_between_steps_change_nothing(tmp_path: Path) -> None:
    spoken: dict[str, list[list[int]]] = {}

    def speaking(which: str) -> Any:
        class Speak(transformers.TrainerCallback):  # type: ignore[misc]
            def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                with torch.no_grad():
                    said = kwargs["model"].generate(
                        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False
                    )
                spoken.setdefault(which, []).append(said[0].tolist())

        return Speak()

    runs = []
    for which, kind in (("ordinary", transformers.Trainer), ("ours", Trainer)):
        more = {"patrickstar": budgets(tmp_path)} if kind is Trainer else {}
        trainer = kind(
            llama(),
            arguments(tmp_path / which, eval_strategy="steps", eval_steps=2),
            train_dataset=Texts(),
            eval_dataset=Texts(8),
            callbacks=[speaking(which)],
            **more,
        )
        trainer.train()
        runs.append(trainer)
    assert_same_run(runs[1], runs[0])
    assert sum("eval_loss" in entry for entry in told(runs[1])) == 2
    assert spoken["ours"] == spoken["ordinary"] and len(spoken["ours"]) == 2
    assert runs[1].engine.memory_report().tiers["host"].peak <= BUDGET
    runs[1].engine.close()


def test_prediction_by_generation_gives_the_same_tokens(tmp_path: Path) -> None:
    t5 = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    found = []
    for kind in (transformers.Seq2SeqTrainer, Seq2SeqTrainer):
        torch.manual_seed(3)
        args = transformers.Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            predict_with_generate=True,
            generation_max_length=8,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        roomy = {"memory": {"host": "640KiB", "disk": {"path": str(tmp_path / "spool")}}}
        more = {"patrickstar": roomy} if kind is Seq2SeqTrainer else {}
        trainer = kind(
            transformers.T5ForConditionalGeneration(t5), args, train_dataset=Texts(), **more
        )
        trainer.train()
        found.append(trainer.predict(Texts(4)).predictions.tolist())
    assert found[0] == found[1]
    trainer.engine.close()


def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="needs the extra [hf]")
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), how)


def test_adapters_train_resume_and_are_saved_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra [hf]")
    ours, ordinary = both(adapted, tmp_path, save_strategy="steps", save_steps=2)
    assert_same_run(ours, ordinary)
    expected = {n: w.clone() for n, w in ours.engine.state_dict().items()}
    ours.engine.close()
    checkpoint = tmp_path / "b" / "checkpoint-4"
    loaded = peft.PeftModel.from_pretrained(llama(), checkpoint).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert size < sum(p.nbytes for p in llama().parameters()), "the frozen weights are in it"
    again = Trainer(
        model_init=adapted,
        args=arguments(tmp_path / "b"),
        train_dataset=Texts(),
        patrickstar=budgets(tmp_path),
    )
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_same_run(again, ordinary)
    again.engine.close()


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    ours, ordinary = both(
        small,
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        learning_rate=0.3,  # so that the best is not the last
        load_best_model_at_end=True,
    )
    best = Path(ours.state.best_model_checkpoint).name
    assert best == Path(ordinary.state.best_model_checkpoint).name
    assert_same_run(ours, ordinary)
    ours.engine.close()


def test_bf16_has_master_weights_and_no_autocast(tmp_path: Path) -> None:
    ours = Trainer(
        llama(),
        arguments(tmp_path, bf16=True),
        train_dataset=Texts(),
        patrickstar=budgets(tmp_path),
    )
    ours.train()
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    assert not hasattr(ours.model, "_original_forward")
    losses = [entry["loss"] for entry in told(ours)]
    assert losses[-1] < losses[0]
    ours.engine.close()


def test_a_config_for_deepspeed_with_auto_is_taken(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2},
        "patrickstar": budgets(tmp_path),
    }
    ours = Trainer(llama(), arguments(tmp_path), train_dataset=Texts(), patrickstar=config)
    ours.train()
    assert ours.engine.memory_report().tiers["host"].peak <= BUDGET
    ours.engine.close()


@pytest.mark.parametrize(
    ("over", "config", "says"),
    [
        ({}, {"gradient_clipping": 1.0}, "max_grad_norm=0.5"),
        ({}, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "learning_rate"),
        (
            {},
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
            "warmup_steps",
        ),
        ({"bf16": True}, {"fp16": {"enabled": True}}, "fp16"),
        ({"torch_compile": True}, {}, "torch_compile"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"optim": "adafactor"}, {}, "adafactor|Adafactor"),
    ],
)
def test_what_contradicts_or_cannot_work_is_refused_before_anything_is_built(
    over: dict[str, Any], config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    def never() -> Any:
        raise AssertionError("the model was built")

    with pytest.raises(ConfigError, match=says):
        Trainer(
            model_init=never,
            args=arguments(tmp_path, **over),
            train_dataset=Texts(),
            patrickstar=config,
        )


def test_an_ordinary_trainers_checkpoint_says_how_its_weights_can_be_used(tmp_path: Path) -> None:
    ordinary = transformers.Trainer(
        llama(),
        arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
        train_dataset=Texts(),
    )
    ordinary.train()
    ours = Trainer(
        llama(), arguments(tmp_path), train_dataset=Texts(), patrickstar=budgets(tmp_path)
    )
    with pytest.raises(ConfigError, match="from_pretrained"):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ours.engine.close()
