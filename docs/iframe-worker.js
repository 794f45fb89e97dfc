// Search of the site when its pages are opened from a file: browsers start no worker from there. This class has the
// interface of one, and runs the script in a hidden frame.
"use strict";

if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      // What the script sends is a message of the worker; without this, the frame would send it to itself.
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inner.importScripts = (...addresses) => Promise.all(addresses.map((each) => this.#load(inner, each)));
      this.loaded = this.#load(inner, address);
      this.frame = frame;
    }

    #load(inner, address) {
      return new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = new URL(address, location.href);
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${address} cannot be read`));
        inner.document.body.append(script);
      });
    }

    // Messages wait until the script is there.
    postMessage(data) {
      this.loaded.then(
        () => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
        (error) => this.dispatchEvent(new ErrorEvent("error", { message: error.message })),
      );
    }

    terminate() {
      this.frame.remove();
    }
  }

  // The script of the theme looks for this name to find its files.
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
