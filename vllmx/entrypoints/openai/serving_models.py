# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/models/serving.py @ v0.25.0
"""The models that the server offers: one, under one or more names."""

from __future__ import annotations

from vllmx.config import ModelConfig
from vllmx.entrypoints.openai.protocol import ModelCard, ModelList, ModelPermission, now
from vllmx.exceptions import VLLMNotFoundError


class OpenAIServingModels:
    """Answers /v1/models and checks the `model` of every request."""

    def __init__(self, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self.names = model_config.served_names
        self._created = now()

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise VLLMNotFoundError unless `name` is served; no name means the one model."""
        if name and name not in self.names:
            raise VLLMNotFoundError(f"The model `{name}` does not exist.", parameter="model")

    def show_available_models(self) -> ModelList:
        """A card for every name."""
        return ModelList(data=[self._card(name) for name in self.names])

    def show_model(self, name: str) -> ModelCard:
        """The card of `name`; raises VLLMNotFoundError."""
        self.check_model(name)
        return self._card(name)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=self.model_config.model,
            max_model_len=self.model_config.max_model_len,
            permission=[ModelPermission()],
        )
