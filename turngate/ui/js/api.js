/**
 * The gateway's API for the page: one function per route of `/page/api`. Only this module makes requests, except for event streams, for
 * which it returns the addresses. It calls `signedOut` when a login has expired.
 *
 * `turngate/server/web` defines the replies.
 */

const BASE = "/page/api";

/** @typedef {Object<string, any>} Json */

/** An error reply. `status` is the HTTP status, or 0 if the gateway could not be reached. */
export class Refused extends Error {
  /**
   * @param {string} message
   * @param {number} status
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * Ignore the failure of a request that will soon be repeated. The bar shows that the gateway cannot be reached.
 * @param {unknown} error
 */
export function passOver(error) {
  if (!(error instanceof Refused)) throw error;
}

/**
 * Return the reply, or `instead` if the status is 404.
 * @param {Promise<Json>} asked
 * @param {Json} instead
 * @returns {Promise<Json>}
 */
export function orElse(asked, instead) {
  return asked.catch((error) => {
    if (error instanceof Refused && error.status === 404) return instead;
    throw error;
  });
}

/** @type {() => void} */
let signedOut = () => {};

/** @param {() => void} callback called when a reply indicates that the login has expired */
export function onSignedOut(callback) {
  signedOut = callback;
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<Json>}
 */
async function ask(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof TypeError)
      throw new Refused("The gateway does not respond. Check that it is running and reachable.", 0);
    throw error;
  }
  if (reply.ok) return reply.json();
  const message = await complaint(reply);
  if (reply.status === 401 && path.startsWith(BASE)) signedOut();
  throw new Refused(message, reply.status);
}

/** @param {Response} reply */
async function complaint(reply) {
  const text = await reply.text();
  try {
    return String(JSON.parse(text).error.message);
  } catch {
    return `The request failed with status ${reply.status} ${reply.statusText}.`; // probably from a proxy, not from the gateway
  }
}

/**
 * @param {string} path
 * @param {Json} [body]
 */
function post(path, body = {}) {
  const headers = { "content-type": "application/json", "x-turngate-page": "1" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body) });
}

/**
 * @param {Object<string, string | number | string[] | null | undefined>} wanted
 */
function query(wanted) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(wanted)) {
    if (Array.isArray(value)) value.forEach((one) => search.append(name, one));
    else if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** @param {string} id */
const one = (id) => `${BASE}/rollouts/${encodeURIComponent(id)}`;

export const me = () => ask(`${BASE}/me`);
/** Send the key in one request. The reply sets a cookie that scripts cannot read. @param {string} key */
export const login = (key) => post("/page/login", { key });
export const logout = () => post("/page/logout");
export const overview = () => ask(`${BASE}/overview`);
/** @param {Object<string, any>} wanted */
export const rollouts = (wanted) => ask(`${BASE}/rollouts${query(wanted)}`);
/** @param {Object<string, any>} wanted */
export const groups = (wanted) => ask(`${BASE}/groups${query(wanted)}`);
/** @param {string} name */
export const group = (name) => ask(`${BASE}/group${query({ name })}`);
/** @param {string} name */
export const evidence = (name) => ask(`${BASE}/group/evidence${query({ name })}`);
/** @param {string} id */
export const rollout = (id) => ask(one(id));
/** @param {string} id */
export const tree = (id) => ask(`${one(id)}/tree`);
/** @param {string} id @param {Object<string, any>} wanted */
export const messages = (id, wanted) => ask(`${one(id)}/messages${query(wanted)}`);
/** @param {string} id @param {Object<string, any>} wanted */
export const tokens = (id, wanted) => ask(`${one(id)}/tokens${query(wanted)}`);
/** @param {Object<string, any>} wanted */
export const training = (wanted) => ask(`${BASE}/training${query(wanted)}`);
/** @param {Object<string, any>} wanted */
export const entropy = (wanted) => ask(`${BASE}/training/entropy${query(wanted)}`);
/** @param {Object<string, any>} wanted */
export const failures = (wanted) => ask(`${BASE}/failures${query(wanted)}`);
/** @param {string} id @param {"cancel" | "seal" | "retry"} verb */
export const act = (id, verb) => post(`${one(id)}/${verb}`);

/** The download address of a rollout. @param {string} id @param {string} format */
export const exportOf = (id, format) => `${one(id)}/export${query({ format })}`;
/** The download address of a group. @param {string} name @param {string} format */
export const exportOfGroup = (name, format) => `${BASE}/export${query({ group: name, format })}`;
/** The event stream of all rollouts. @param {number} after */
export const changes = (after) => `${BASE}/events${query({ after })}`;
/** The event stream of one rollout. @param {string} id @param {number} after */
export const eventsOf = (id, after) => `${one(id)}/events${query({ after })}`;
