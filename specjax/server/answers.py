"""Make the bodies of answers, and the chunks of streams, in OpenAI's formats. Nothing here knows of HTTP."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.engine.requests import Completion, Metrics, Piece, Result, TokenLogProbs
from specjax.server.call_stream import CallPart
from specjax.server.protocol import Call
from specjax.server.served import Served
from specjax.server.tools import SentCalls, ToolCall

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not


class Head(NamedTuple):
    """Fields that all chunks of an answer share."""

    id: str
    created: int  # seconds since 1970


def new_head(call: Call) -> Head:
    """Return the head of an answer that begins now."""
    name = call.request_id or uuid.uuid4().hex
    return Head(f"{'chatcmpl' if call.is_chat else 'cmpl'}-{name}", int(time.time()))


def answer(call: Call, results: Sequence[Result], head: Head, served: Served) -> dict[str, Any]:
    """Return the body of an answer.

    Args:
        call: the request.
        results: the result of each of its prompts.
        head: made by `new_head`.
        served: the model.
    """
    make = _chat_choice if call.is_chat else _completion_choice
    choices = []
    for prompt, result in enumerate(results):
        completions = result.completions
        if call.params.num_samples == call.params.n:  # all have a place, the place of the stream
            completions = sorted(completions, key=lambda each: each.index)
        for i, completion in enumerate(completions):
            choice = make(call, prompt, result, completion, served)
            choices.append({"index": prompt * call.params.n + i} | choice)
    kind = "chat.completion" if call.is_chat else "text_completion"
    body = _envelope(call, head, served, kind, choices) | _figures(call, results)
    return body | (_of_prompt(call, 0, results[0], served) if call.is_chat else {})


def _of_prompt(call: Call, prompt: int, result: Result, served: Served) -> dict[str, Any]:
    """Return requested fields for the tokens of a prompt; a chat has it in its body, a completion in each choice."""
    found: dict[str, Any] = {}
    if call.has_token_ids:
        found["prompt_token_ids"] = call.prompts[prompt]
    if call.prompt_logprobs is not None:
        entries = result.prompt_logprobs or []
        listed = zip(call.prompts[prompt], entries, strict=True)
        found["prompt_logprobs"] = [
            None if entry is None else list_prompt(served, token, entry, call.prompt_logprobs)
            for token, entry in listed
        ]
    return found


def _envelope(call: Call, head: Head, served: Served, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": call.model,
        "system_fingerprint": served.fingerprint,
        "choices": choices,
    }


def _figures(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    figures: dict[str, Any] = {"usage": usage(call, results)}
    drafts = speculative_decoding([result.metrics for result in results])
    return figures | ({"metrics": {"speculative_decoding": drafts}} if drafts else {})


def usage(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    """Return the counts of tokens of an answer: all generated samples count, each prompt once."""
    num_prompt = sum(map(len, call.prompts))
    num_generated = 0 if call.omits_output else sum(result.metrics.num_tokens for result in results)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in results)},
    }


def speculative_decoding(figures: Sequence[Metrics]) -> dict[str, Any] | None:
    """Return the counts of drafts over the prompts of an answer, None where nothing was drafted."""
    num_drafted = sum(each.num_drafted for each in figures)
    num_accepted = sum(each.num_accepted for each in figures)
    if not num_drafted:
        return None
    found: dict[str, Any] = {
        "num_spec_tokens": max(len(each.acceptance_rate_per_position) for each in figures),
        "num_steps": sum(each.num_steps for each in figures),
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "draft_acceptance_rate": num_accepted / num_drafted,
    }
    if len(figures) == 1:
        rates = figures[0].acceptance_rate_per_position
        found["mean_acceptance_length"] = figures[0].mean_acceptance_length
        found["acceptance_rate_per_position"] = [None if math.isnan(rate) else rate for rate in rates]
    return found


def _completion_choice(
    call: Call, prompt: int, result: Result, completion: Completion, served: Served
) -> dict[str, Any]:
    text = "" if call.omits_output else completion.text
    tokens, entries = ([], []) if call.omits_output else (completion.token_ids, completion.logprobs or [])
    logprobs = None
    if call.top_logprobs is not None:
        start = len(call.prompt_texts[prompt]) if call.echo else 0
        listed = list_completion(served, tokens, entries, call.top_logprobs, start, start + len(text))
        if call.echo:
            ids, before = call.prompts[prompt], result.prompt_logprobs or []
            pairs = zip(ids, before, strict=True)
            before = [entry and cut(entry, token, call.top_logprobs) for token, entry in pairs]
            echoed = list_completion(served, ids, before, call.top_logprobs, 0, start)
            listed = {name: echoed[name] + listed[name] for name in listed}
        logprobs = listed
    finish_reason = "length" if call.omits_output else completion.finish_reason
    echo = call.prompt_texts[prompt] if call.echo else ""
    stop_reason = None if call.omits_output else completion.stop_reason
    choice = {"text": echo + text, "logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": stop_reason}
    return choice | ({"token_ids": tokens} if call.has_token_ids else {}) | _of_prompt(call, prompt, result, served)


def _chat_choice(call: Call, prompt: int, result: Result, completion: Completion, served: Served) -> dict[str, Any]:
    reasoning, content, calls, _ = call.parts(call.tools).whole(completion.text)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    message |= reasoned(reasoning)
    if calls:
        message["tool_calls"] = [each.body() for each in calls]
    logprobs = None
    if call.top_logprobs is not None:
        entries = completion.logprobs or []
        logprobs = {"content": list_chat(served, completion.token_ids, entries, call.top_logprobs), "refusal": None}
    reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    choice = {
        "message": message,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": completion.stop_reason,
    }
    return choice | ({"token_ids": completion.token_ids} if call.has_token_ids else {})


def reasoned(reasoning: str) -> dict[str, str]:
    """Return the fields of a message with its reasoning, under both names that clients read; none for none."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def list_chat(
    served: Served, tokens: Sequence[int], entries: Sequence[TokenLogProbs], top: int
) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens in the format of chats.

    Args:
        served: the model.
        tokens: the token ids.
        entries: for each token, its log-probability and the log-probabilities of the most likely tokens.
        top: how many of the most likely tokens to list.
    """

    def item(token: int, value: float) -> dict[str, Any]:
        content = served.token_bytes(token)
        return {"token": served.token_text(token), "logprob": _finite(value), "bytes": list(content)}

    return [
        item(token, entry[token]) | {"top_logprobs": [item(*pair) for pair in _most_likely(entry)[:top]]}
        for token, entry in zip(tokens, entries, strict=True)
    ]


def list_completion(
    served: Served, tokens: Sequence[int], entries: Sequence[TokenLogProbs | None], top: int, start: int, stop: int
) -> dict[str, list[Any]]:
    """Return the log-probabilities of tokens in the format of completions.

    Args:
        served: the model.
        tokens: the token ids.
        entries: as in `list_chat`; None for the first token of a prompt.
        top: how many of the most likely tokens to list beside the token itself; 0 lists none.
        start: where their text begins in the text of the choice, in characters.
        stop: where it ends.
    """

    def likely(entry: TokenLogProbs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, value in _most_likely(entry):
            named.setdefault(served.token_text(token), _finite(value))
        return named

    pairs = list(zip(tokens, entries, strict=True))
    return {
        "tokens": [served.token_text(token) for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry[token]) for token, entry in pairs],
        "top_logprobs": [None if entry is None or not top else likely(entry) for _, entry in pairs],
        "text_offset": [min(offset, stop) for offset in served.offsets(tokens, start)],
    }


def list_prompt(served: Served, token: int, entry: TokenLogProbs, top: int) -> dict[str, dict[str, Any]]:
    """Return the log-probabilities at a place of a prompt by token id, with their ranks.

    Args:
        served: the model.
        token: the token that is there.
        entry: its log-probability and the log-probabilities of the most likely tokens.
        top: how many of these to list. The rank of the token is only known if it is one of them.
    """
    entry = cut(entry, token, top)
    ranked = [each for each, _ in _most_likely(entry)]
    is_known = len(ranked) <= top
    return {
        str(each): {
            "logprob": _finite(value),
            "rank": ranked.index(each) + 1 if each != token or is_known else None,
            "decoded_token": served.token_text(each),
        }
        for each, value in entry.items()
    }


def cut(entry: TokenLogProbs, token: int, top: int) -> TokenLogProbs:
    """Return the log-probabilities of a token and of the most likely ones, at most `top` of them."""
    return {token: entry[token]} | dict(_most_likely(entry)[:top])


def _most_likely(entry: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(entry.items(), key=lambda pair: -pair[1])


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)


class ChoiceStream:
    """Make the chunks of one sample's choice in a stream.

    Args:
        call: the request.
        prompt: the number of the prompt.
        sample: the number of the sample among the samples of the prompt.
        head: made by `new_head`, for all choices of the answer.
        served: the model.
    """

    def __init__(self, call: Call, prompt: int, sample: int, head: Head, served: Served):
        self._call, self._prompt, self._head, self._served = call, prompt, head, served
        self._index, self._sample = prompt * call.params.n + sample, sample
        self._parts, self._calls = call.parts(call.tools), SentCalls()
        self._tokens: list[int] = []
        self._num_received = self._num_sent = 0  # characters of the text that have come, and that have been sent
        self._num_listed = 0  # tokens whose ids have been sent
        self._is_begun = False  # whether a chunk has been made

    def start(self) -> dict[str, Any]:
        """Return the first chunk: the role of a chat, or the prompt that a completion echoes."""
        if self._call.is_chat:
            return self._chunk({"role": "assistant", "content": ""})
        return self._chunk(self._call.prompt_texts[self._prompt])

    def feed(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Return the chunk of some pieces, None where they give nothing to send yet."""
        if self._call.omits_output:
            return None
        first = len(self._tokens)
        self._tokens += [piece.token_id for piece in pieces]
        new = "".join(piece.text for piece in pieces)
        self._num_received += len(new)
        reasoning, text, calls = self._parts.feed(new)
        if not (reasoning or text or calls or self._call.has_token_ids) and self._call.top_logprobs is None:
            return None
        start, self._num_sent = self._num_sent, self._num_sent + len(text)
        logprobs = self._logprobs(first, [piece.logprobs or {} for piece in pieces], start)
        if not self._call.is_chat:
            return self._chunk(text, logprobs)
        delta = {} if calls and not (reasoning or text) else _delta(reasoning, text)
        return self._chunk(delta | self._call_delta(calls), logprobs)

    def finish(self, result: Result) -> list[dict[str, Any]]:
        """Return the last chunks, which say why the sample ended. All pieces must have been fed before.

        Args:
            result: the result of the prompt.
        """
        if self._call.omits_output:
            return [self._chunk("", None, "length")]
        ended = next(each for each in result.completions if each.index == self._sample)
        reason, chunks = ended.finish_reason, []
        reasoning, text, calls, is_cut = self._parts.finish()
        if reasoning or text:
            chunks.append(self._chunk(_delta(reasoning, text)))
        if rest := self._calls.rest(calls):
            chunks.append(self._chunk(self._call_delta(rest)))
        if calls and not is_cut and reason == "stop":
            reason = "tool_calls"
        last = self._chunk({} if self._call.is_chat else "", None, reason)
        last["choices"][0]["stop_reason"] = ended.stop_reason
        return [*chunks, last]

    def _call_delta(self, parts: Sequence[CallPart]) -> dict[str, Any]:
        """Return more of the calls of a message: the first part of each has its name and id."""
        listed: dict[int, dict[str, Any]] = {}
        for part in parts:
            if self._calls.add(part):
                listed[part.number] = {"index": part.number} | ToolCall(part.name, part.arguments).body()
            elif part.number in listed:
                listed[part.number]["function"]["arguments"] += part.arguments
            else:
                listed[part.number] = {"index": part.number, "function": {"arguments": part.arguments}}
        return {"tool_calls": list(listed.values())} if listed else {}

    def _logprobs(self, first: int, entries: list[TokenLogProbs], start: int) -> dict[str, Any] | None:
        top, tokens = self._call.top_logprobs, self._tokens[first:]
        if top is None:
            return None
        if self._call.is_chat:
            return {"content": list_chat(self._served, tokens, entries, top), "refusal": None}
        return list_completion(self._served, tokens, entries, top, start, self._num_received)

    def _chunk(self, content: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        field = "delta" if self._call.is_chat else "text"
        choice = {"index": self._index, field: content, "logprobs": logprobs, "finish_reason": reason}
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        body = _envelope(self._call, self._head, self._served, kind, [choice])
        if self._call.include_usage:
            body["usage"] = self._usage() if self._call.continuous_usage else None
        if self._call.has_token_ids:
            if not self._is_begun:
                (body if self._call.is_chat else choice)["prompt_token_ids"] = self._call.prompts[self._prompt]
            choice["token_ids"] = self._tokens[self._num_listed :]
            self._num_listed = len(self._tokens)
        self._is_begun = True
        return body

    def _usage(self) -> dict[str, Any]:
        """Return the counts of tokens of this choice so far."""
        counts = len(self._call.prompts[self._prompt]), len(self._tokens)
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def _delta(reasoning: str, text: str) -> dict[str, str]:
    """Return more of a message; reasoning alone has no content."""
    return reasoned(reasoning) | ({} if reasoning and not text else {"content": text})


def usage_chunk(call: Call, results: Sequence[Result], head: Head, served: Served) -> dict[str, Any]:
    """Return the chunk that ends a stream whose request has `include_usage`: it has no choices."""
    kind = "chat.completion.chunk" if call.is_chat else "text_completion"
    return _envelope(call, head, served, kind, []) | _figures(call, results)
