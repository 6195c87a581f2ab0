"""The endpoint of agents: an HTTP server in the runner that speaks as the OpenAI API does, and what it makes of calls.

`server` accepts requests and knows whose they are, `asked` reads them, `chat` and `responses` are the two forms of the
API, `conversation` finds the sequence that a call goes on in, and `agents` runs attempts."""
