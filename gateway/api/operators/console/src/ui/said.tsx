// The message of an error, as the reply of its call had it.
export const Said = ({ message }: { message: string }) => (
  <figure class="quote">
    <figcaption class="note">The reply said</figcaption>
    <pre dir="auto" tabIndex={0}>
      {message}
    </pre>
  </figure>
);
