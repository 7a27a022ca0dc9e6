"""`ChatTokens`: finds the token ids that vLLM computes with, in requests of `ray.serve.llm`, and sends them on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines.vllm_chats import ENGINE, MODEL, make_model

from raydix.schemas import InvalidRequest
from raydix.schemas.engine_namespace import namespace_of

MESSAGES = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "What is a page? " * 20}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def find(model: Path) -> Any:
    """Finds the tokens of a request with this body."""
    from raydix.actors.engines.vllm.tokens import ChatTokens

    tokens_of = ChatTokens(str(model), ENGINE)

    def find(body: Any, adapter: str = "") -> Any:
        return tokens_of(SimpleNamespace(args=[body], metadata=SimpleNamespace(multiplexed_model_id=adapter)))

    return find


def chat(messages: Any = MESSAGES, **fields: Any) -> Any:
    from ray.serve.llm.openai_api_models import ChatCompletionRequest

    return ChatCompletionRequest(model=MODEL, messages=messages, **fields)


def completion(prompt: Any, **fields: Any) -> Any:
    from ray.serve.llm.openai_api_models import CompletionRequest

    return CompletionRequest(model=MODEL, prompt=prompt, **fields)


def test_a_chat_carries_the_ids_of_its_template(find: Any, tokenizer: Any) -> None:
    body = chat(cache_salt="s")

    tokens, namespace = find(body)

    assert tokens == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert namespace == namespace_of(cache_salt="s")
    assert body.kv_transfer_params == {"prompt_token_ids": tokens}


def test_a_completion_carries_its_ids(find: Any, tokenizer: Any) -> None:
    text, ids = "What is a lease? " * 20, [5, 6, 7]
    of_text, of_ids = completion(text), completion(ids)

    assert find(of_text) == (tokenizer(text).input_ids, namespace_of())
    assert of_text.prompt == tokenizer(text).input_ids
    assert find(of_ids) == (ids, namespace_of())


def test_an_echoed_request_is_sent_as_it_came(find: Any, tokenizer: Any) -> None:
    a_chat, a_completion = chat(echo=True), completion("What is a slot?", echo=True)

    assert find(a_chat) is not None
    assert find(a_completion) == (tokenizer("What is a slot?").input_ids, namespace_of())
    assert a_chat.kv_transfer_params is None
    assert a_completion.prompt == "What is a slot?"


def test_other_requests_have_no_tokens(find: Any) -> None:
    assert find(chat([{"role": "user", "content": [IMAGE]}])) is None
    assert find(completion(["one", "two"])) is None
    assert find(chat(), adapter="lora") is None
    assert find(SimpleNamespace(input="an embedding")) is None


def test_an_unknown_argument_is_refused_by_name(model: Path) -> None:
    from raydix.actors.engines.vllm.tokens import ChatTokens

    with pytest.raises(InvalidRequest, match="blok_size"):
        ChatTokens(str(model), {"blok_size": 16})
