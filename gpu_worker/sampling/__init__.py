"""From the target's logits to accepted tokens: laws, counter-based noise, acceptance rules, logprobs."""
