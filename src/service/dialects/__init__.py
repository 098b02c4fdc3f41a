"""The dialects of requests. Each module turns bodies of one dialect into `service.requests.TurnRequest`, and answers
into bodies and events."""
