.PHONY: check format
check:
	ruff format --check .
	ruff check .
	mypy
	pytest
format:
	ruff format .
	ruff check --fix .
