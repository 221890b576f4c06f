"""Compiling a model. In a file of its own, because exported models come without it and its kernels."""
from nanochat.model.gpt import GPT, Block, Embedding


def compile_model(model: GPT) -> None:
    """Compile the blocks that `keep_layers` kept. On a GPU the embeddings' gradients get a kernel of their own."""
    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, Block):
            module.compile_body(device)
        elif isinstance(module, Embedding) and module.weight.is_cuda:
            # Here, because torch for a CPU comes without Triton.
            from nanochat.model.triton_kernels import EmbeddingLookup

            module.lookup = EmbeddingLookup.apply
