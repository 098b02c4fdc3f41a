"""What a start looks at before it gives the service its address."""

import socket

import pytest
from config_support import small

from trireme.core.errors import BadInput
from trireme.launch.service import check_port


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"service\.port = {port}: .*in use(.|\n)*--service\.port"):
            check_port(small(service={"host": "127.0.0.1", "port": port}))
    check_port(small(service={"host": "127.0.0.1", "port": port}))
