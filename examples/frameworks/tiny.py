"""What the adapters share: microbatches, tiny models from config, the objective as a sum."""

import torch
import torch.nn.functional as F
from labkit.audit import probe

VOCABULARY = 50
K = 4  # the accumulation that every framework is told


def window(accumulation=K):
    """Microbatches of unequal valid tokens, the first label valid, as frameworks like them."""
    return [{"input_ids": tokens, "labels": labels} for tokens, labels in probe(VOCABULARY, accumulation=accumulation)]


def cross_entropy(logits, labels, reduction="mean", **options):
    """Next-token loss."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction=reduction, **options)


def valid(labels):
    """Labels that are predicted."""
    return (labels[:, 1:] != -100).sum()


def loss_sum(model, microbatch):
    """The loss summed over valid tokens, and their number."""
    found = model(microbatch["input_ids"])
    return cross_entropy(getattr(found, "logits", found), microbatch["labels"], "sum"), valid(microbatch["labels"])


class Plain(torch.nn.Module):
    """A language model of plain torch."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        """Logits, [b, T, V]."""
        x = self.embedding(tokens)
        return self.head(torch.tanh(x + x.cumsum(1) / 10))


def llama():
    """A Llama of 8 thousand weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )


def gpt2():
    """A GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
    )


def trained(model, Trainer=None, **options):
    """A step that lets a transformers Trainer make one update; optimizer and schedule stay from window to window."""
    import tempfile

    import transformers

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def step(microbatches):
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=K,
                max_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                remove_unused_columns=False,
                **options,
            )
            (Trainer or transformers.Trainer)(
                model,
                arguments,
                train_dataset=list(microbatches),
                data_collator=lambda examples: examples[0],
                optimizers=(optimizer, scheduler),
            ).train()

    return step
