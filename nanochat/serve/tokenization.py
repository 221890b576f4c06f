"""/tokenize, /detokenize and /tokenizer_info in the shapes of vLLM, which clients such as lm-eval ask for."""
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, model_validator

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.serve.api_error import ApiError
from nanochat.serve.logprobs import token_text
from nanochat.serve.openai_api import Body, Message


class TokenizeRequest(Body):
    """A prompt, or the messages of a chat, whose tokens are those that the chat begins with."""
    model: str | None = None    # the first one
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = []
    add_special_tokens: bool = True     # <|bos|> before a prompt; a chat has it anyway
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_source(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "expected a prompt or messages, one of both", param="prompt")
        return self

    def ids_of_prompt(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's tokens. The name of a special token by itself is that token; within a text it is text."""
        if self.prompt in tokenizer.special_tokens:
            return [tokenizer.encode_special(self.prompt)]
        return tokenizer.encode(self.prompt, prepend="<|bos|>" if self.add_special_tokens else None)

    def answer(self, tokenizer: Tokenizer, ids: list[int], context: int) -> dict[str, Any]:
        names = [token_text(tokenizer, token) for token in ids] if self.return_token_strs else None
        return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]

    def answer(self, tokenizer: Tokenizer) -> dict[str, str]:
        if max(self.tokens, default=0) >= tokenizer.get_vocab_size():
            raise ApiError(400, f"tokens must be within 0 and {tokenizer.get_vocab_size() - 1}", param="tokens")
        return {"prompt": tokenizer.decode(self.tokens)}


def tokenizer_info(tokenizer: Tokenizer, context: int, chats: bool) -> dict[str, Any]:
    end, bos = default_stop(tokenizer)
    special = {str(tokenizer.encode_special(name)): {"content": name, "special": True}
               for name in tokenizer.special_tokens}
    return {
        "tokenizer_class": "nanochat.data.tokenizer.Tokenizer", "model_max_length": context, "add_bos_token": True,
        "bos_token": tokenizer.decode([bos]), "eos_token": tokenizer.decode([end if chats else bos]),
        "vocab_size": tokenizer.get_vocab_size(), "added_tokens_decoder": special,
    }
