"""The HTTP front door of live replicas: OpenAI's and Anthropic's dialects in front of one sampler.

It imports neither vLLM nor another room, and gets a sampler behind the Protocol in `service.gateway`.
"""
