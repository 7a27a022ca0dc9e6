"""`ChatTokens`: finds the tokens of chat and completion requests of `ray.serve.llm`, for `RaydixRequestRouter`.

request_router_kwargs={
    "caches": "chat-*",
    "tokens_of": "raydix.actors.engines.vllm.tokens:ChatTokens",
    "tokens_of_kwargs": {"model": "/models/small-chat"},
}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.platforms import current_platform
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import has_non_text_content, load_chat_template
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.renderers.online_renderer import OnlineRenderer

from raydix.actors.client.loop_thread import LoopThread
from raydix.schemas import InvalidRequest
from raydix.schemas.engine_namespace import CacheNamespace, namespace_of

_CONNECTOR = ("kv_transfer_config", "kv_events_config")  # engine arguments that its tokenizer does not need


class ChatTokens:
    """Renders a request as the engine does: with vLLM's renderer, the engine's tokenizer and its chat template.

    The token ids travel on with the request, so the engine does not tokenize it again. A chat request carries them as
    `kv_transfer_params["prompt_token_ids"]`, which vLLM's renderer takes in place of the messages; a completion request
    carries them as its prompt. A request with `echo` is sent as it came.

    It returns None for requests with images or other inputs that are no text, for LoRA adapters (the path of an
    adapter, a part of its namespace, is known to the replica alone), for several prompts in one request, and for
    requests that the engine will refuse.
    """

    def __init__(self, model: str, engine_kwargs: Mapping[str, Any] | None = None) -> None:
        """Load the tokenizer and the chat template. It takes seconds.

        Args:
            model: the folder of the model, as `model_source` of `LLMConfig`.
            engine_kwargs: as in `LLMConfig`, with arguments of vLLM's frontend, such as `chat_template`.

        Raises:
            InvalidRequest: vLLM has no argument of such a name.
        """
        if not current_platform.device_type:  # This process sees no GPU; it computes nothing.
            current_platform.device_type = "cpu"
        given = {name: value for name, value in (engine_kwargs or {}).items() if name not in _CONNECTOR}
        of_engine = {field.name for field in fields(AsyncEngineArgs)}
        of_frontend = {field.name for field in fields(FrontendArgs)}
        if unknown := sorted(given.keys() - of_engine - of_frontend):
            raise InvalidRequest(f"engine_kwargs must be arguments of vLLM, and {', '.join(unknown)} are none")
        engine = {name: value for name, value in given.items() if name not in of_frontend}
        config = AsyncEngineArgs(model=model, **engine).create_engine_config()
        frontend = FrontendArgs(**{name: value for name, value in given.items() if name in of_frontend})
        self._model_config = config.model_config
        self._renderer = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=load_chat_template(frontend.chat_template),
            chat_template_content_format=frontend.chat_template_content_format,
            trust_request_chat_template=frontend.trust_request_chat_template,
            enable_auto_tools=frontend.enable_auto_tool_choice,
            exclude_tools_when_tool_choice_none=frontend.exclude_tools_when_tool_choice_none,
            tool_parser=frontend.tool_call_parser,
            default_chat_template_kwargs=frontend.default_chat_template_kwargs,
        )
        self._loop = LoopThread("raydix-chat-tokens")

    def __call__(self, request: Any) -> tuple[list[int], CacheNamespace] | None:
        """Return the token ids and the namespace of a request.

        Args:
            request: the `PendingRequest` of Serve. Its body gets the ids.
        """
        body = request.args[0] if request.args else None
        if request.metadata.multiplexed_model_id:
            return None
        if hasattr(body, "messages"):
            tokens = self._tokens_of_chat(body)
        elif hasattr(body, "prompt"):
            tokens = self._tokens_of_completion(body)
        else:
            return None
        if tokens is None:
            return None
        return tokens, namespace_of(cache_salt=getattr(body, "cache_salt", None))

    def _tokens_of_chat(self, body: Any) -> list[int] | None:
        if has_non_text_content(body.messages):
            return None
        rendered = self._loop.run(self._renderer.render_chat(body.model_copy(), skip_mm_cache=True))
        if isinstance(rendered, ErrorResponse):
            return None
        tokens = self._only_tokens(rendered[1])
        if tokens is not None and not body.echo:
            body.kv_transfer_params = {**(body.kv_transfer_params or {}), "prompt_token_ids": tokens}
        return tokens

    def _tokens_of_completion(self, body: Any) -> list[int] | None:
        if not isinstance(body.prompt, str) or body.prompt_embeds is not None:
            is_ids = isinstance(body.prompt, list) and bool(body.prompt) and isinstance(body.prompt[0], int)
            return body.prompt if is_ids else None
        inputs = self._loop.run(
            self._renderer.preprocess_completion(body, prompt_input=body.prompt, prompt_embeds=None, skip_mm_cache=True)
        )
        tokens = self._only_tokens(inputs)
        if tokens is not None and not body.echo:
            body.prompt = tokens
        return tokens

    def _only_tokens(self, inputs: list[Any]) -> list[int] | None:
        """Return the ids of the only prompt."""
        if len(inputs) != 1:
            return None
        ids = extract_prompt_components(self._model_config, inputs[0]).token_ids
        return None if ids is None else list(ids)
