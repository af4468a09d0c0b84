// The counterpart of relay.py for images with Node but no Python: same command line, same behavior, same tests.
// Read relay.py first: it explains the purpose and the rules. No dependencies, Node 18 and newer.

import fs from "node:fs";
import http from "node:http";
import https from "node:https";
import { randomBytes } from "node:crypto";
import { parseArgs } from "node:util";

const GATEWAY_HEADER = "x-turngate"; // on every reply from the gateway
const ATTEMPT_HEADER = "x-turngate-attempt";
const IDEMPOTENCY_HEADER = "idempotency-key";
const HEAD_LIMIT = 256 * 1024;
const CONNECT_MS = 15_000;
const REACHED = "reached"; // written to --reached-file on success
const FIRST_WAIT_MS = 100;
const LONGEST_WAIT_MS = 5_000;
const TARGET_CHECK_MS = 1_000; // how often a waiting call checks whether the target has changed
const HOP_BY_HOP = new Set(["connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"]);

const { values: options } = parseArgs({
  options: {
    target: { type: "string" },
    port: { type: "string", default: "0" },
    "port-file": { type: "string" },
    "reached-file": { type: "string" },
    "give-up-s": { type: "string", default: "600" },
    "body-limit": { type: "string", default: String(64 * 1024 * 1024) },
  },
});
const giveUpMs = Number(options["give-up-s"]) * 1000;
const bodyLimit = Number(options["body-limit"]);

class NoAnswer extends Error {} // the gateway has not answered, so it is safe to send the request again
class TooLarge extends Error {}

function readTarget() {
  try {
    return fs.readFileSync(options.target, "utf8").trim();
  } catch {
    return "";
  }
}

// ---- one request ----

async function answer(incoming, outgoing) {
  const gone = new AbortController(); // aborted when the agent disconnects
  outgoing.on("close", () => gone.abort());
  const body = await readBody(incoming);
  const headers = forwardedHeaders(incoming, body);
  const deadline = Date.now() + giveUpMs;
  for (let attempt = 1, wait = FIRST_WAIT_MS; !gone.signal.aborted; attempt++, wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    try {
      return await tryOnce(incoming, body, [...headers, ATTEMPT_HEADER, String(attempt)], outgoing, gone.signal);
    } catch (error) {
      if (!(error instanceof NoAnswer)) throw error;
      console.error(`attempt ${attempt}: ${error.message}`);
      const pause = wait * (0.5 + Math.random() / 2);
      if (Date.now() + pause >= deadline) return refuse(outgoing, 503, `the gateway cannot be reached: ${error.message}`, "gateway_unreachable");
      await sleep(pause, gone.signal);
    }
  }
}

async function readBody(incoming) {
  const chunks = [];
  let size = 0;
  for await (const chunk of incoming) {
    size += chunk.length;
    if (size > bodyLimit) throw new TooLarge(`the body is larger than ${bodyLimit} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

function forwardedHeaders(incoming, body) {
  const hopHeaders = (incoming.headers.connection ?? "").toLowerCase().split(",").map((name) => name.trim());
  const dropped = new Set([...HOP_BY_HOP, ...hopHeaders, "host", "content-length", ATTEMPT_HEADER]);
  const headers = pairs(incoming.rawHeaders).filter(([name]) => !dropped.has(name.toLowerCase())).flat();
  if (!(IDEMPOTENCY_HEADER in incoming.headers)) headers.push(IDEMPOTENCY_HEADER, randomBytes(16).toString("hex"));
  if (body.length || ["POST", "PUT", "PATCH"].includes(incoming.method)) headers.push("content-length", String(body.length));
  return headers;
}

function pairs(raw) {
  return Array.from({ length: raw.length / 2 }, (_, i) => [raw[2 * i], raw[2 * i + 1]]);
}

async function tryOnce(incoming, body, headers, outgoing, gone) {
  const target = readTarget();
  const [client, address] = resolveTarget(target, incoming.url);
  const request = client.request({ ...address, method: incoming.method, headers: ["host", address.host ?? "localhost", ...headers], agent: false, maxHeaderSize: HEAD_LIMIT });
  const abort = () => request.destroy();
  gone.addEventListener("abort", abort);
  try {
    const reply = await waitForReply(request, body, target);
    if ((reply.statusCode === 404 || reply.statusCode >= 500) && !(GATEWAY_HEADER in reply.headers)) {
      throw new NoAnswer(`received a reply with status ${reply.statusCode}, but not from the gateway`);
    }
    await passReply(reply, outgoing);
  } finally {
    gone.removeEventListener("abort", abort);
    request.destroy();
  }
}

function resolveTarget(target, path) {
  if (target.startsWith("unix:")) return [http, { socketPath: target.slice(5), path }];
  let url;
  try {
    url = new URL(target);
  } catch {
    throw new NoAnswer("the gateway's address is not known yet");
  }
  const port = url.port || (url.protocol === "https:" ? 443 : 80);
  const address = { hostname: url.hostname.replace(/^\[|\]$/g, ""), host: url.host, port, path: url.pathname.replace(/\/+$/, "") + path };
  return [url.protocol === "https:" ? https : http, address];
}

function waitForReply(request, body, target) {
  return new Promise((resolve, reject) => {
    const fail = (reason) => reject(new NoAnswer(reason));
    const connecting = setTimeout(() => fail(`cannot connect within ${CONNECT_MS / 1000} s`), CONNECT_MS);
    const checking = setInterval(() => readTarget() !== target && fail("the gateway's address has changed"), TARGET_CHECK_MS);
    const settle = (then) => (value) => {
      clearTimeout(connecting);
      clearInterval(checking);
      then(value);
    };
    request.on("socket", (socket) => {
      socket.setKeepAlive?.(true, 20_000);
      socket.once(request.protocol === "https:" ? "secureConnect" : "connect", () => clearTimeout(connecting));
    });
    request.on("response", settle(resolve));
    request.on("error", settle((error) => fail(error.message || error.code)));
    request.on("close", settle(() => fail("the connection closed before a reply arrived")));
    request.end(body);
  });
}

// Forward a reply as it arrives. If it is cut off, the agent's connection is cut off too.
function passReply(reply, outgoing) {
  return new Promise((resolve) => {
    outgoing.sendDate = false;
    outgoing.writeHead(reply.statusCode, reply.statusMessage, pairs(reply.rawHeaders).filter(([name]) => !HOP_BY_HOP.has(name.toLowerCase())).flat());
    outgoing.flushHeaders();
    reply.on("data", (chunk) => outgoing.write(chunk) || reply.pause());
    outgoing.on("drain", () => reply.resume());
    reply.on("end", () => (reply.complete ? outgoing.end(resolve) : cut()));
    reply.on("error", cut);
    reply.on("close", () => reply.complete || cut());
    outgoing.on("close", resolve);
    function cut() {
      outgoing.socket?.resetAndDestroy?.();
      resolve();
    }
  });
}

function refuse(outgoing, status, message, kind = "invalid_request_error") {
  if (outgoing.headersSent || outgoing.destroyed) return outgoing.destroy();
  const body = JSON.stringify({ error: { message, type: kind, code: kind } });
  outgoing.writeHead(status, { "content-type": "application/json", "content-length": Buffer.byteLength(body) });
  outgoing.end(body);
}

function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

// ---- one WebSocket ----

function isSocketRequest(incoming) {
  return incoming.method === "GET" && (incoming.headers.upgrade ?? "").toLowerCase() === "websocket";
}

// Forward the request to open a WebSocket until the gateway answers, then forward bytes in both directions.
async function openSocket(incoming, socket, rest) {
  if (!isSocketRequest(incoming)) return refuseSocket(socket, 426, "only a WebSocket can be opened here");
  const gone = new AbortController();
  socket.on("close", () => gone.abort()).on("error", () => gone.abort());
  const headers = [...forwardedHeaders(incoming, Buffer.alloc(0)), "connection", "upgrade", "upgrade", "websocket"];
  const deadline = Date.now() + giveUpMs;
  for (let attempt = 1, wait = FIRST_WAIT_MS; !gone.signal.aborted; attempt++, wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    try {
      return await trySocket(incoming, [...headers, ATTEMPT_HEADER, String(attempt)], socket, rest, gone.signal);
    } catch (error) {
      if (!(error instanceof NoAnswer)) throw error;
      console.error(`attempt ${attempt}: ${error.message}`);
      const pause = wait * (0.5 + Math.random() / 2);
      if (Date.now() + pause >= deadline) return refuseSocket(socket, 503, `the gateway cannot be reached: ${error.message}`, "gateway_unreachable");
      await sleep(pause, gone.signal);
    }
  }
}

function trySocket(incoming, headers, socket, rest, gone) {
  const target = readTarget();
  const [client, address] = resolveTarget(target, incoming.url);
  const request = client.request({ ...address, method: "GET", headers: ["host", address.host ?? "localhost", ...headers], agent: false, maxHeaderSize: HEAD_LIMIT });
  gone.addEventListener("abort", () => request.destroy());
  return new Promise((resolve, reject) => {
    request.on("upgrade", (reply, upstream, first) => {
      socket.write(replyHead(reply, ["connection: upgrade", "upgrade: websocket"]));
      socket.write(first);
      upstream.write(rest);
      upstream.pipe(socket).pipe(upstream);
      gone.addEventListener("abort", () => upstream.destroy());
      for (const event of ["close", "error"]) upstream.on(event, () => socket.destroy());
      resolve();
    });
    waitForReply(request, "", target).then(async (reply) => {
      if ((reply.statusCode === 404 || reply.statusCode >= 500) && !(GATEWAY_HEADER in reply.headers)) {
        throw new NoAnswer(`received a reply with status ${reply.statusCode}, but not from the gateway`);
      }
      socket.write(replyHead(reply, ["connection: close"]));
      reply.pipe(socket);
      reply.on("end", resolve);
    }).catch(reject);
  });
}

function refuseSocket(socket, status, message, kind = "invalid_request_error") {
  const body = JSON.stringify({ error: { message, type: kind, code: kind } });
  const head = [`HTTP/1.1 ${status} Refused`, "content-type: application/json", `content-length: ${Buffer.byteLength(body)}`, "connection: close"];
  socket.end([...head, "", body].join("\r\n"));
}

function replyHead(reply, connection) {
  const headers = pairs(reply.rawHeaders).filter(([name]) => !HOP_BY_HOP.has(name.toLowerCase())).map(([name, value]) => `${name}: ${value}`);
  return [`HTTP/1.1 ${reply.statusCode} ${reply.statusMessage}`, ...headers, ...connection, "", ""].join("\r\n");
}

// ---- the command ----

function serve() {
  // Older versions of Node lack `shouldUpgradeCallback` and pass every upgrade request to `openSocket`.
  const shouldUpgradeCallback = isSocketRequest;
  const server = http.createServer({ maxHeaderSize: HEAD_LIMIT, keepAliveTimeout: 75_000, requestTimeout: 0, shouldUpgradeCallback }, (incoming, outgoing) => {
    answer(incoming, outgoing).catch((error) => {
      if (!(error instanceof TooLarge)) return outgoing.destroy();
      outgoing.shouldKeepAlive = false; // the rest of the body has not been read
      refuse(outgoing, 413, error.message);
    });
  });
  server.on("upgrade", (incoming, socket, rest) => openSocket(incoming, socket, rest).catch(() => socket.destroy()));
  server.listen(Number(options.port), "127.0.0.1", () => {
    const port = server.address().port;
    writeAtomically(options["port-file"], String(port));
    if (options["reached-file"]) reportReached(port, options["reached-file"]);
  });
  for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => process.exit(0));
}

function writeAtomically(path, text) {
  fs.writeFileSync(path + ".new", text);
  fs.renameSync(path + ".new", path);
}

// Write to a file whether the gateway answers through this relay.
function reportReached(port, path) {
  const request = http.request({ host: "127.0.0.1", port, method: "HEAD", path: "/", agent: false }, (reply) => {
    reply.resume();
    writeAtomically(path, GATEWAY_HEADER in reply.headers ? REACHED : `the reply is not from the gateway: ${reply.statusCode}`);
  });
  request.on("error", (error) => writeAtomically(path, `the relay does not answer: ${error.message}`));
  request.end();
}

serve();
