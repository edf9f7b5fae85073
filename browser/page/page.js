/** The page: what is typed goes to the worker, and its text is shown as it arrives. */

const element = (id) => document.getElementById(id);
const [form, prompt, output, status, stop, start] = [
  "form",
  "prompt",
  "output",
  "status",
  "stop",
  "generate",
].map(element);
const wanted = new URLSearchParams(location.search).get("device");
/** Text that the next frame shows: a long one is laid out at most once a frame. */
let waiting = "";
/** The prompt where none is typed. */
let beginning = "";
const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });

const answers = {
  ready({ space, parameters, device }) {
    document.title = space.title;
    element("title").textContent = space.title;
    beginning = space.beginning;
    if (space.model) {
      element("card").href = space.model;
      element("card").hidden = false;
    }
    show(`Ready: ${parameters.toLocaleString("en")} parameters, on the ${device}.`);
    setBusy(false);
  },
  broken({ message }) {
    show(message);
  },
  text({ text }) {
    if (waiting === "") requestAnimationFrame(showWaiting);
    waiting += text;
  },
  done({ characters, seconds, device }) {
    showWaiting();
    const speed = Math.round(characters / seconds).toLocaleString("en");
    show(`${characters.toLocaleString("en")} characters, ${speed} a second, on the ${device}.`);
    setBusy(false);
  },
  error({ message }) {
    showWaiting();
    show(message);
    setBusy(false);
  },
};

worker.addEventListener("message", ({ data }) => answers[data.type](data));
worker.addEventListener("error", () => show("This browser cannot run the page's worker."));
worker.postMessage({ type: "open", device: wanted });

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (start.disabled || !form.reportValidity()) return;
  setBusy(true);
  show("Generating.");
  const text = prompt.value || beginning;
  output.textContent = text;
  worker.postMessage({ type: "generate", prompt: text, options: chosen() });
});
stop.addEventListener("click", () => worker.postMessage({ type: "stop" }));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !stop.disabled) stop.click();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});

/** The options of the form; an empty top-k keeps all tokens. */
function chosen() {
  const topK = element("top-k").value;
  return {
    length: Number(element("length").value),
    temperature: Number(element("temperature").value),
    ...(topK === "" ? {} : { topK: Number(topK) }),
  };
}

function show(text) {
  status.textContent = text;
}

function showWaiting() {
  output.firstChild.appendData(waiting); // one text: a screen reader would stop at parts
  output.scrollTop = output.scrollHeight;
  waiting = "";
}

/** While text is generated, screen readers wait for the whole of it. */
function setBusy(isBusy) {
  const isLeft = document.activeElement === (isBusy ? start : stop);
  if (isLeft) output.focus({ preventScroll: true }); // a disabled button gets no Escape
  start.disabled = isBusy;
  stop.disabled = !isBusy;
  output.setAttribute("aria-busy", isBusy);
}
