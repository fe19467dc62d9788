"""The option of `make oracle`."""


def pytest_addoption(parser):
    parser.addoption("--whole-grid", action="store_true", help="every batch size with every chunk size and all prompts")
