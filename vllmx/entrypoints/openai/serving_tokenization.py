# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/serve/tokenize/{protocol,serving}.py @ v0.25.0
"""POST /tokenize and /detokenize: what a prompt or a chat becomes, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from vllmx.entrypoints.openai.protocol import (
    INT64_MAX,
    OpenAIBaseModel,
)
from vllmx.entrypoints.openai.protocol_chat import ConversationFields
from vllmx.entrypoints.openai.serving import OpenAIServing, warn_unknown_fields
from vllmx.entrypoints.openai.serving_chat import render_messages
from vllmx.exceptions import VLLMValidationError


class TokenizeCompletionRequest(OpenAIBaseModel):
    """Body of POST /tokenize for a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ConversationFields):
    """Body of POST /tokenize for messages, as a chat would render them."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = False


def _kind(body: Any) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "completion"


TokenizeRequest = Annotated[
    Annotated[TokenizeCompletionRequest, Tag("completion")]
    | Annotated[TokenizeChatRequest, Tag("chat")],
    Discriminator(_kind),
]


class TokenizeResponse(OpenAIBaseModel):
    """Body of the answer to /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(OpenAIBaseModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT64_MAX)]]


class DetokenizeResponse(OpenAIBaseModel):
    """Body of the answer to /detokenize."""

    prompt: str


class ServingTokenization(OpenAIServing):
    """Answers tokenization requests; the engine takes no part."""

    async def create_tokenize(
        self, body: TokenizeCompletionRequest | TokenizeChatRequest
    ) -> TokenizeResponse:
        """Token ids of the body's prompt or messages."""
        self.models.check_model(body.model)
        warn_unknown_fields(body)
        tokens = await asyncio.to_thread(self._encode, body)
        strings = None
        if body.return_token_strs:
            strings = self.require_tokenizer().convert_ids_to_tokens(tokens)
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=self.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )

    def _encode(self, body: TokenizeCompletionRequest | TokenizeChatRequest) -> list[int]:
        tokenizer = self.require_tokenizer()
        if isinstance(body, TokenizeCompletionRequest):
            text = body.prompt
        else:
            text = render_messages(tokenizer, body, body.chat_template_kwargs)
        return tokenizer.encode(text, body.add_special_tokens)

    async def create_detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """Text of the body's token ids; ids that no token has are an error."""
        self.models.check_model(body.model)
        warn_unknown_fields(body)
        tokenizer = self.require_tokenizer()
        unknown = [token for token in body.tokens if token > tokenizer.max_token_id]
        if unknown:
            raise VLLMValidationError(
                f"Token id {unknown[0]} is out of vocabulary",
                parameter="tokens",
                value=unknown[0],
            )
        return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens))
