"""From the engine's outputs to the responses of one stream."""

from __future__ import annotations

import time

from dskapi.v1 import inference_pb2
from dskd.engine.request import FinishReason, MadeToken, RequestStats, StepOutput
from dskd.rpc.convert import FINISH_REASONS, MODES
from dskd.rpc.parse import ParsedRequest
from dskd.text.detokenizer import IncrementalDetokenizer
from dskd.text.stop import StopMatcher
from dskd.text.tokenizer import TextCodec


class Answer:
    """Makes the responses to one request, in order. Times count from `arrived` (time.monotonic)."""

    def __init__(self, request: ParsedRequest, model: str, codec: TextCodec, arrived: float) -> None:
        self._request = request.generation
        self._model = model
        self._codec = codec
        self._detokenizer = IncrementalDetokenizer(codec)
        self._stops = StopMatcher(request.stops)
        self._arrived = arrived
        self._token_times: list[float] = []
        self._stats: RequestStats | None = None
        self.finish: FinishReason | None = None

    def respond(self, output: StepOutput) -> inference_pb2.GenerateResponse:
        """The response to one output; when it was the last, `finish` says why."""
        response = inference_pb2.GenerateResponse(request_id=self._request.request_id, model=self._model)
        self._stats = output.stats or self._stats
        for token in output.tokens:
            self._token_times.append(time.monotonic() - self._arrived)
            response.tokens.append(self._token(token))
            response.text += self._text(token)
            if self.finish:
                break
        if output.finish and not self.finish:
            response.text += self._rest(output.finish)
        if self.finish:
            self._sum_up(response, self.finish)
        return response

    def _text(self, token: MadeToken) -> str:
        """Text that is whole and sure to be before any stop string; an end-of-text token has none."""
        if token.id in self._request.end_token_ids:
            return ""
        return self._before_stop(self._detokenizer.push(token.id))

    def _rest(self, finish: FinishReason) -> str:
        """What was held back; a stop string may still be completed by it."""
        text = self._before_stop(self._detokenizer.flush())
        if self.finish:
            return text
        self.finish = finish
        return text + self._stops.flush()

    def _before_stop(self, text: str) -> str:
        emitted, stopped = self._stops.push(text)
        if stopped:
            self.finish = FinishReason.STOP
        return emitted

    def _token(self, token: MadeToken) -> inference_pb2.GeneratedToken:
        top = (
            inference_pb2.TokenLogprob(id=id_, logprob=logprob, text=self._codec.decode_token(id_))
            for id_, logprob in token.top_logprobs
        )
        return inference_pb2.GeneratedToken(
            id=token.id,
            precision=MODES[token.mode],
            generation=token.generation,
            engine=token.engine,
            logprob=token.logprob,
            top_logprobs=top,
        )

    def _sum_up(self, response: inference_pb2.GenerateResponse, finish: FinishReason) -> None:
        times = self._token_times or [time.monotonic() - self._arrived]
        seconds = times[-1] - times[0]
        response.finish_reason = FINISH_REASONS[finish]
        response.usage.prompt_tokens = len(self._request.prompt)
        response.usage.generated_tokens = len(self._token_times)
        response.usage.preemptions = self._stats.preemptions if self._stats else 0
        response.timings.queue_ms = self._stats.queue_s * 1e3 if self._stats else 0
        response.timings.time_to_first_token_ms = times[0] * 1e3
        response.timings.total_ms = times[-1] * 1e3
        response.timings.tokens_per_second = (len(times) - 1) / seconds if seconds > 0 else 0
