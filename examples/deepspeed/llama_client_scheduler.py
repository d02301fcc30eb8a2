"""Train Hugging Face's Llama with a scheduler of the script's own."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 2000,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main():
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(shape)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), lr_scheduler=schedule, config=CONFIG
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        starts = torch.randint(64, (4, 1), generator=generator)
        tokens = ((starts + 5 * torch.arange(24)) % 64).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {loss.item():.9g}")
        print(f"step {step} rate {scheduler.get_last_lr()[0]:.9g}")


if __name__ == "__main__":
    main()
