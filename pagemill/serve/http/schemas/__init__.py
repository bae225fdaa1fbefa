"""Request and response bodies of the OpenAI API. The only place that uses pydantic."""
