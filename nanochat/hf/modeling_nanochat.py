"""
An exported model with pieces that transformers has no class for; scripts.export_hf copies this file into its folder:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The nanochat_*.py beside the copy are the sources of the model itself. There is no cache: each token that generate()
writes takes a pass over all tokens before it.
"""
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig


class NanoChatModernConfig(PreTrainedConfig):
    """gpt: the fields of GPTConfig. transformers reads the others under its own names."""

    model_type = "nanochat_modern"
    gpt: dict | None = None
    vocab_size = property(lambda self: self.gpt["vocab_size"])
    hidden_size = property(lambda self: self.gpt["n_embd"])
    num_hidden_layers = property(lambda self: self.gpt["n_layer"])
    max_position_embeddings = property(lambda self: self.gpt["sequence_len"])


class NanoChatModernForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoChatModernConfig

    def __init__(self, config: NanoChatModernConfig):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**config.gpt))
        self.post_init()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, logits_to_keep: int = 0, **_
    ) -> dict:
        """All tokens: this model has no cache, whatever use_cache says."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutput:
        """
        input_ids (B, T) → logits (B, T, vocab_size) in float32, or of the last logits_to_keep tokens of each row.
        attention_mask (B, T): zeros mark padding at either end of a row; ValueError for other zeros. labels (B, T): the
        same tokens, −100 where nothing is to be predicted; they give the mean loss.
        """
        T = input_ids.size(1)
        place = torch.arange(T, device=input_ids.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        # Padding at the start goes to the end of its row, where no token sees it, and comes back.
        padding = (mask.cumsum(1) == 0).sum(1, keepdim=True)
        moved = (place + padding) % T
        if (mask.gather(1, moved).diff() > 0).any():
            raise ValueError("attention_mask has zeros between ones; only either end of a row can be padding")
        tokens = input_ids.gather(1, moved)
        x = self.gpt.hidden(tokens, self.gpt.cu_seqlens_of(tokens))
        x = x.gather(1, ((place - padding) % T)[..., None].expand_as(x))
        logits = self.gpt.lm_head(x[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.size(-1))
        return CausalLMOutput(loss=loss, logits=logits)
