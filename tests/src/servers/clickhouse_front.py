"""A thin HTTP front, ours, over the real ClickHouse engine (chdb): what the sink needs of ClickHouse's HTTP interface, and no more.

usage: clickhouse_front.py PORT FOLDER

POST /?query=..&database=..&setting=.. with a body: the body of an INSERT is its data; otherwise the body follows the query.
A body with `Content-Encoding` goes to the engine as it came, with the name of how it is packed: the engine unpacks it.
"""
import os
import re
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from chdb import session

# What is no setting.
OURS = {"query", "database", "user", "password", "query_id", "wait_end_of_query"}
LOCK = threading.Lock()


def run(query, pairs, body, packed, folder):
    settings = ", ".join("%s = '%s'" % (name, value.replace("'", "\\'")) for name, value in pairs if name not in OURS)
    insert = re.match(r"(?is)\s*(insert\s+into\s+.*?)\s+format\s+(\w+)\s*$", query)
    if insert and body is not None:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".bin") as data:
            data.write(body)
            data.flush()
            said = "%s FROM INFILE '%s'" % (insert.group(1), data.name)
            said += " COMPRESSION '%s'" % packed if packed else ""
            said += " SETTINGS " + settings if settings else ""
            return perform("%s FORMAT %s" % (said, insert.group(2)), "TSV")
    if body and packed:
        body = unpacked(body, packed, folder)
    if body:
        query = query + "\n" + body.decode() if query else body.decode()
    form = re.search(r"(?is)\s+format\s+(\w+)\s*$", query)
    output = form.group(1) if form else "TSV"
    if form:
        query = query[: form.start()]
    if settings and re.match(r"(?is)\s*select", query):
        query += " SETTINGS " + settings
    return perform(query, output)


def unpacked(body, packed, folder):
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".bin") as data:
        data.write(body)
        data.flush()
        return perform("SELECT raw_blob FROM file('%s', RawBLOB, 'raw_blob String', '%s')" % (data.name, packed), "RawBLOB")


def perform(query, output):
    with LOCK:
        return SESSION.query(query, output).bytes()


class Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    query_id = ""
    # Head and body of an answer are two writes: the second must not wait for an acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, b"Ok.\n")

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            # The engine sees nothing of a body that was cut off, as ClickHouse refuses one.
            self.close_connection = True
            return
        pairs = parse_qsl(urlsplit(self.path).query, keep_blank_values=True)
        query = dict(pairs).get("query", "")
        self.query_id = dict(pairs).get("query_id", "")
        try:
            self.answer(200, run(query, pairs, body if length else None, self.packed(), FOLDER))
        except Exception as fault:  # chdb raises RuntimeError with ClickHouse's text
            text = str(fault)
            code = re.search(r"Code: (\d+)", text)
            self.answer(500, text[code.start() :].encode() if code else text.encode(), code and code.group(1))

    def packed(self):
        packed = self.headers.get("Content-Encoding") or ""
        return re.fullmatch(r"\w*", packed).group()

    def answer(self, status, body, code=None):
        try:
            self.send_response(status)
            if code:
                self.send_header("X-ClickHouse-Exception-Code", code)
            if self.query_id:
                self.send_header("X-ClickHouse-Query-Id", self.query_id)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True


if __name__ == "__main__":
    FOLDER = sys.argv[2]
    SESSION = session.Session(os.path.join(FOLDER, "data"))
    SESSION.query("SELECT 1", "TSV")
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Front).serve_forever()
