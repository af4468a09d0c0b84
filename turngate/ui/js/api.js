/**
 * What the page asks the gateway: one function for each route of `/page/api`. Views call these; nothing else fetches. Who is not logged
 * in any more is told by `signedOut`, wherever that is noticed.
 *
 * The shapes of the answers are those of `turngate/server/web/routes/`; where a view needs one it says which fields it reads.
 */

const BASE = "/page/api";

/** @typedef {Object<string, any>} Json */

/** An answer that says no. `status` is the HTTP status; 0: nobody answered. */
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
 * For what may fail without anybody having to hear of it: numbers that are asked for again soon. The bar says that the gateway is gone.
 * @param {unknown} error
 */
export function passOver(error) {
  if (!(error instanceof Refused)) throw error;
}

/**
 * What is answered, or something in its stead where there is no such thing.
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

/** @param {() => void} told called when an answer says that nobody is logged in */
export function onSignedOut(told) {
  signedOut = told;
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
      throw new Refused("The gateway does not answer. Is it running, and reachable from here?", 0);
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
    return `The gateway answered ${reply.status} ${reply.statusText}.`; // not in our own words: something in between
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
/** The key goes into the body of one request; the answer is a cookie that no script can read. @param {string} key */
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
export const failures = (wanted) => ask(`${BASE}/failures${query(wanted)}`);
/** @param {string} id @param {"cancel" | "seal" | "retry"} verb */
export const act = (id, verb) => post(`${one(id)}/${verb}`);

/** Where a rollout is downloaded. @param {string} id @param {string} format */
export const exportOf = (id, format) => `${one(id)}/export${query({ format })}`;
/** Where the rollouts of a group are downloaded. @param {string} name @param {string} format */
export const exportOfGroup = (name, format) => `${BASE}/export${query({ group: name, format })}`;
/** Where changes of all rollouts are told. @param {number} after */
export const changes = (after) => `${BASE}/events${query({ after })}`;
/** Where everything that is told of one rollout is. @param {string} id @param {number} after */
export const eventsOf = (id, after) => `${one(id)}/events${query({ after })}`;
