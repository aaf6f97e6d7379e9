"""One submission of a request, and the next where a call of an undeclared tool has to be written again.

The second one goes on from the tokens that are kept, with the noise and the penalties of the first: but for what its
grammar forbids it draws what the first would have drawn. There is no third: only declared tools get through.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.replicas.events import Finished, Submit, Timing, Usage
from holdfast.replicas.seed import prompt_seed
from holdfast.replicas.text.reply import Reply


@dataclass(slots=True)
class Spent:
    """Seconds of the text side, of all submissions of a request."""

    render_s: float = 0.0
    validate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """`earlier` is how the withdrawn submission ended."""

    submit: Submit
    reply: Reply
    earlier: Finished | None = None
    spent: Spent = field(default_factory=Spent)

    def again(self, ended: Finished, reply: Callable[[], Reply]) -> "Attempt | None":
        """What to submit next, with a new reader from `reply`; None where the reply stands as it is."""
        rewrite = self.reply.rewrite
        if rewrite is None:
            return None
        sampling = self.submit.sampling
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=prompt_seed(self.submit.tokens))
        submit = replace(
            self.submit,
            tokens=np.concatenate((self.submit.tokens, np.array(rewrite.tokens, np.int32))),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(rewrite.tokens)),
            matcher=rewrite.matcher,
            n_generated=len(rewrite.tokens),
        )
        fresh = reply()
        fresh.feed(rewrite.tokens, rewrite.logprobs)  # the client has what comes out
        return Attempt(submit, fresh, ended, self.spent)

    def usage(self, ended: Finished) -> Usage:
        """Of the reply as the client has it: tokens that were withdrawn are not in it."""
        first = self.earlier or ended
        reply = self.reply
        return Usage(first.usage.prompt, first.usage.cached, reply.completion_tokens, reply.reasoning_tokens)

    def timing(self, ended: Finished) -> Timing:
        first = (self.earlier or ended).timing
        end, spent = ended.timing.finished, self.spent
        return Timing(first.arrived, first.scheduled, first.first_token, end, spent.render_s, spent.validate_s)
