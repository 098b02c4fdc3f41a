"use strict";
// What all tabs use: the key, what is asked of the server, and small helpers.

const KEY = "trireme console key";
const element = id => document.getElementById(id);

// The key is behind `#` in the address that was printed. It is kept in this tab alone, and taken out of the address.
function takeKey() {
  const found = /^#key=(.+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}

class Refused extends Error {}

// Asks the server for a value. Throws Refused with its reason.
async function ask(name, query = {}) {
  const key = sessionStorage.getItem(KEY), asked = new URLSearchParams(query).toString();
  const reply = await fetch(`api/${name}${asked ? `?${asked}` : ""}`, {headers: key ? {authorization: `Bearer ${key}`} : {}});
  const told = await reply.json();
  if (reply.ok) return told;
  if (reply.status === 401 || reply.status === 403) element("ask-key").hidden = false;
  throw new Refused(told.error ? told.error.message : `status ${reply.status}`);
}

// Lets something that is clicked say what went wrong.
function act(work) {
  return async event => {
    try {
      await work(event);
    } catch (error) {
      element("unreached").textContent = error.message;
      element("unreached").hidden = false;
    }
  };
}

// Fills a `select` with [value, text] if that differs, and keeps what is chosen.
function fill(select, options) {
  const now = JSON.stringify(options), before = select.value;
  if (select.dataset.options === now) return;
  select.dataset.options = now;
  select.textContent = "";
  for (const [value, text] of options) make(select, "option", {value}, text);
  if (options.some(([value]) => String(value) === before)) select.value = before;
}
