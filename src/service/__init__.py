"""The HTTP service in front of live replicas, for programs that use the clients of OpenAI, Anthropic or Tinker.

It imports neither vLLM nor a room. It gets the replicas as a sampler, behind the Protocol
`trireme.core.sampler.Sampler`.
"""
