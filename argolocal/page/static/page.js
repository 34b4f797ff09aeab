// Updates the parts of a page that have the attribute data-live when the run changes. Only the nodes
// that differ are changed, so that focus, selection, scroll positions and open details stay.
// The page works without this script: a running run is then loaded again every five seconds.

const status = document.getElementById("connection");
let shownVersion = document.body.dataset.version;
let isLoading = false;
let isOutdated = false;
let events = null;

function update(newDocument) {
  const focused = document.activeElement;
  for (const part of document.querySelectorAll("[data-live]")) {
    const newPart = newDocument.getElementById(part.id);
    if (newPart) change(part, newPart);
  }
  // an element that was moved loses the focus
  if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  document.title = newDocument.title;
  document.dispatchEvent(new CustomEvent("page-updated"));
}

// Make an element equal to another one. The parts of a page that a script has built (data-keep) stay.
function change(element, newElement) {
  if (element.isEqualNode(newElement) || element.dataset?.keep !== undefined) return;
  for (const { name } of [...element.attributes]) {
    if (!newElement.hasAttribute(name) && !isOfUser(element, name)) element.removeAttribute(name);
  }
  for (const { name, value } of newElement.attributes) {
    if (element.getAttribute(name) !== value && !isOfUser(element, name)) element.setAttribute(name, value);
  }
  changeChildren(element, newElement);
}

// The user opens and closes details.
function isOfUser(element, attribute) {
  return attribute === "open" && element.localName === "details";
}

function changeChildren(element, newElement) {
  const children = new Map();
  for (const child of element.children) {
    const key = keyOf(child);
    if (key && !children.has(key)) children.set(key, child);
  }

  let next = element.firstChild;
  for (const newChild of [...newElement.childNodes]) {
    const key = keyOf(newChild);
    const isSame = next && !key && !keyOf(next) && next.nodeName === newChild.nodeName;
    const child = key ? children.get(key) : isSame ? next : undefined;
    if (!child || child.nodeName !== newChild.nodeName) {
      element.insertBefore(document.importNode(newChild, true), next);
      continue;
    }
    children.delete(key);
    if (child === next) next = next.nextSibling;
    else element.insertBefore(child, next);

    if (child.nodeType === Node.ELEMENT_NODE) change(child, newChild);
    else if (child.nodeValue !== newChild.nodeValue) child.nodeValue = newChild.nodeValue;
  }

  while (next) {
    const following = next.nextSibling;
    next.remove();
    next = following;
  }
}

// A row or an item of a list is the same as before if its first link is.
function keyOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return "";
  if (node.id || node.dataset?.key) return node.id || node.dataset.key;
  if (node.localName !== "tr" && node.localName !== "li") return "";
  return node.querySelector("a[href]")?.getAttribute("href") ?? "";
}

async function load() {
  isOutdated = true;
  if (isLoading) return;
  isLoading = true;
  while (isOutdated) {
    isOutdated = false;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.ok) {
        const newDocument = new DOMParser().parseFromString(await answer.text(), "text/html");
        shownVersion = newDocument.body.dataset.version;
        document.body.dataset.refreshSeconds = newDocument.body.dataset.refreshSeconds ?? "";
        update(newDocument);
      } else {
        status.textContent = answer.status === 404 ? "removed" : "outdated";
      }
    } catch {
      // the server has ended: the event stream reconnects and loads the page again
    }
  }
  isLoading = false;
}

function watch() {
  const subject = document.body.dataset.subject;
  const stream = new EventSource(`/events?run=${encodeURIComponent(subject)}`);
  events = stream;
  stream.addEventListener("version", (event) => {
    status.textContent = event.data === "removed" ? "removed" : "";
    if (event.data !== shownVersion && event.data !== "removed") load();
  });
  stream.onerror = () => {
    status.textContent = "not connected";
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(() => {
      if (events === stream) watch();
    }, 1000);
  };
}

// A browser has few connections to a server, so only visible pages use one.
function watchWhileVisible() {
  if (document.visibilityState === "visible") {
    if (!events) watch();
  } else {
    events?.close();
    events = null;
  }
}

// Durations grow although the run has not changed.
function refresh() {
  const seconds = Number(document.body.dataset.refreshSeconds ?? 0);
  if (seconds && document.visibilityState === "visible" && !status.textContent) load();
  setTimeout(refresh, 1000 * (seconds || 5));
}

watchWhileVisible();
document.addEventListener("visibilitychange", watchWhileVisible);
addEventListener("pagehide", () => {
  events?.close();
  events = null;
});
addEventListener("pageshow", watchWhileVisible);
setTimeout(refresh, 5000);
