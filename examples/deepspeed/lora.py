"""Train LoRA adapters of peft on a frozen Llama, and save only them."""

import tempfile
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 2000,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main():
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    base = LlamaForCausalLM(shape)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(base, adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        starts = torch.randint(64, (2, 1), generator=generator)
        tokens = ((starts + 7 * torch.arange(16)) % 64).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
    with tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder, state_dict=engine.module_state_dict())
        saved = load_file(Path(folder) / "adapter_model.safetensors")
    print(f"step 6 adapters {len(saved)}")
    changed = sum(float(value.float().abs().sum()) > 0 for name, value in saved.items())
    print(f"step 6 filled {changed}")


if __name__ == "__main__":
    main()
