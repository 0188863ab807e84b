"""A port that greets in words that are no HTTP, as a server of SSH does."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def greeter() -> Iterator[str]:
    """Return its address as a URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                        connection.recv(1 << 16)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
